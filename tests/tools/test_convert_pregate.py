"""`convert pregate`: an option changes and no weight, in a full file; what it cannot do, in one sentence.

tests/e2e/test_parallel_generation.py trains on what it writes.
"""

import pytest
import torch
from moe_files import load, save
from tool_in_process import convert, refusal

BOTH_SIDES = (
    "encoder.layers.1",
    *(f"decoder.layers.{i}{'!' * (i % 2 == 0)}" for i in range(6)),
)


@pytest.fixture
def files(tmp_path):
    return ("pregate", "--input", tmp_path / "a.pt", "--output", tmp_path / "b.pt", "--moe-pregate")


def test_gates_see_an_earlier_input_and_weights_stay(files, tmp_path):
    save(tmp_path / "a.pt", BOTH_SIDES, balance_bias=True)
    printed = convert(*files, 1)
    assert printed.splitlines()[:4] == [
        "encoder_1: its gate reads its own input",
        "decoder_1: its gate reads its own input",
        "decoder_3: its gate reads the input of decoder_1",
        "decoder_5: its gate reads the input of decoder_3",
    ]
    a, b = load(tmp_path / "a.pt"), load(tmp_path / "b.pt")
    assert list(a["model"]) == list(b["model"])
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])
    assert b["cfg"] == {**a["cfg"], "model": {**a["cfg"]["model"], "moe_pregate": 1}}
    assert "last_optimizer_state" not in b  # of gates that read something else


def test_what_cannot_be_pre_gated_is_refused(files, tmp_path):
    save(tmp_path / "a.pt", BOTH_SIDES)
    sentence = "the encoder has 1 MoE layers and the decoder has 3 MoE layers; give 1 to 2."
    for ahead in (3, 0):
        assert refusal(*files, ahead) == f"pregate (--moe-pregate) is {ahead} but {sentence}"
    save(tmp_path / "a.pt", ("decoder.layers.0!", "decoder.layers.1!"))
    assert "whose model has no experts" in refusal(*files, 1)
    save(tmp_path / "a.pt")
    convert(*files, 1)
    (tmp_path / "b.pt").replace(tmp_path / "a.pt")
    assert "which is pre-gated already (--moe-pregate 1); give the" in refusal(*files, 1)
