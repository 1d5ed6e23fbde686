"""The tests run `convert student` and `convert pregate`; tests/e2e trains converted models."""

import pytest
import torch
from moe_files import load, save
from tool_in_process import convert, refusal

# Layers whose names end with "!" are dense, so every second decoder layer has experts.
EIGHT = tuple(f"decoder.layers.{i}{'!' * (i % 2 == 0)}" for i in range(6))
BOTH = ("encoder.layers.0!", "encoder.layers.1", "encoder.layers.2", *EIGHT)


@pytest.fixture
def files(request, tmp_path):
    kind = "pregate" if "pre_gated" in request.node.name else "student"
    return (kind, "--input", tmp_path / "a.pt", "--output", tmp_path / "b.pt")


def written(tmp_path, layers, freq, **options):
    def of_freq(model):
        model["decoder.layers.3.fc1.gate.weight"] += 1

    save(tmp_path / "a.pt", layers, change=of_freq)
    state = load(tmp_path / "a.pt")
    state["cfg"]["model"] |= {"moe_freq": freq, "decoder_layers": 6, **options}
    torch.save(state, tmp_path / "a.pt")
    return state


@pytest.mark.parametrize(
    "words, kept, freq",
    [
        (("--drop-layers", "0,1"), [2, 3, 4, 5], 2),
        (("--drop-layers", "1,4,5"), [0, 2, 3], 3),
        (("--drop-layers", "4, 0,1,2"), [3, 5], 1),
    ],
    ids=["every second", "the third", "each"],
)
def test_convert_student_renumbers_layers_and_updates_options(files, words, kept, freq, tmp_path):
    a = written(tmp_path, EIGHT, 2, decoder_layers_to_keep="0,1,2,3,4,5")
    printed = convert(*files, *words)
    b = load(tmp_path / "b.pt")
    for new, old in enumerate(kept):
        before, after = (
            {k.removeprefix(name): t for k, t in state["model"].items() if k.startswith(name)}
            for state, name in ((a, f"decoder.layers.{old}."), (b, f"decoder.layers.{new}."))
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    others = {key for key in a["model"] if ".layers." not in key}
    assert {key for key in b["model"] if ".layers." not in key} == others
    assert not any(f".layers.{len(kept)}." in key for key in b["model"])
    options = {"decoder_layers": len(kept), "moe_freq": freq, "decoder_layers_to_keep": None}
    assert b["cfg"]["model"] == {**a["cfg"]["model"], **options}
    assert "last_optimizer_state" not in b
    assert f"decoder: {len(kept)} of 6 layers: {', '.join(map(str, kept))}" in printed
    assert f"--decoder-layers {len(kept)}" in printed.splitlines()[-1]


def test_convert_student_can_remove_different_layers_of_encoder_and_decoder(files, tmp_path):
    """Both remaining encoder layers have experts, so the encoder gets another MoE frequency."""
    written(tmp_path, BOTH, 2, encoder_layers=3)
    convert(*files, "--drop-layers", "0,1,2,3", "--encoder-drop-layers", "0")
    options = load(tmp_path / "b.pt")["cfg"]["model"]
    named = ("encoder_layers", "decoder_layers", "encoder_moe_freq", "moe_freq", "moe_expert_count")
    assert [options[key] for key in named] == [2, 2, 1, 2, "4"]
    assert "decoder_moe_freq" not in options


@pytest.mark.parametrize(
    "words, sentence",
    [
        ((), "no layer would be removed; give --drop-layers"),
        (("--drop-layers", "6"), "--drop-layers is '6', but the decoder has 6 layers; give"),
        (("--drop-layers", "one"), "--drop-layers is 'one', but the decoder has 6 layers; give"),
        (("--drop-layers", "0,1,2,3,4,5"), "but the decoder has 6 layers; give some of their numbers"),
        (("--encoder-drop-layers", "0"), "but the encoder has 0 layers"),
        (("--drop-layers", "0"), "0, 2, 4 (counted from 0) would have experts, but no --moe-freq"),
        (("--drop-layers", "1,3,4,5"), "no layer with experts would be left; keep at least one"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_convert_student_rejects_layers_that_cannot_be_removed(files, words, sentence, tmp_path):
    written(tmp_path, EIGHT, 2)
    assert sentence in refusal(*files, *words)


def test_convert_student_raises_an_error_for_a_model_with_stages(files, tmp_path):
    save(tmp_path / "a.pt", ["stages.0.blocks.0!", "stages.0.blocks.1!"])
    assert "no encoder or decoder layers" in refusal(*files, "--drop-layers", "0")


def test_convert_student_raises_an_error_if_pre_gating_needs_too_many_earlier_moe_layers(files, tmp_path):
    """Two of three MoE layers remain, and only one of the two has an earlier MoE layer."""
    written(tmp_path, EIGHT, 2, moe_pregate=2)
    message = refusal(*files, "--drop-layers", "0,1")
    assert "pregate (--moe-pregate) is 2 but the decoder has 2 MoE layers; give 1 to 1" in message
    assert not (tmp_path / "b.pt").exists()


def test_a_pre_gated_model_has_new_gate_inputs_but_the_old_weights(files, tmp_path):
    save(tmp_path / "a.pt", ("encoder.layers.1", *EIGHT), balance_bias=True)
    printed = convert(*files, "--moe-pregate", 1)
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
    assert "last_optimizer_state" not in b  # The old optimizer state was for other gate inputs.


def test_convert_pregate_raises_an_error_for_a_model_that_cannot_be_pre_gated(files, tmp_path):
    save(tmp_path / "a.pt", ("encoder.layers.1", *EIGHT))
    sentence = "the encoder has 1 MoE layers and the decoder has 3 MoE layers; give 1 to 2."
    for ahead in (3, 0):
        assert (
            refusal(*files, "--moe-pregate", ahead) == f"pregate (--moe-pregate) is {ahead} but {sentence}"
        )
    save(tmp_path / "a.pt", ("decoder.layers.0!", "decoder.layers.1!"))
    assert "whose model has no experts" in refusal(*files, "--moe-pregate", 1)
    save(tmp_path / "a.pt")
    convert(*files, "--moe-pregate", 1)
    (tmp_path / "b.pt").replace(tmp_path / "a.pt")
    assert "which is pre-gated already (--moe-pregate 1); give a" in refusal(*files, "--moe-pregate", 1)
