"""A checkpoint that would run code, or that holds infinity, is refused in one sentence by every rank."""

import re

import pytest
import torch
from cli import USER_DIR, fairseq, refused, start, wait
from models import lm_args
from tool_in_process import convert

import fairseq_tutel

LONG = pytest.mark.long


def test_no_command_runs_code_of_a_file(lm_data, tmp_path):
    fairseq("train", *lm_args(lm_data, tmp_path, updates=1))
    state, bad = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False), tmp_path / "bad.pt"
    code = f"[500+0*__import__('os').system('touch {tmp_path / 'ran'}'),1000]"
    state["cfg"]["model"]["adaptive_softmax_cutoff"] = state["cfg"]["optimizer"]["adam_betas"] = code
    torch.save(state, bad)
    outputs = [
        refused("eval-lm", lm_data, "--user-dir", USER_DIR, "--path", bad),
        refused("train", *lm_args(lm_data, tmp_path / "new", "--finetune-from-model", bad)),
    ]
    for output in outputs:
        assert ", which fairseq would run as code" in output.splitlines()[-1]
    with pytest.raises(ValueError, match=", which fairseq would run as code"):
        fairseq_tutel.from_checkpoint(bad, lm_data)
    assert not (tmp_path / "ran").exists()


def write_infinity(file, written, part):
    """Write a checkpoint with infinity in the last element of an expert or of an optimizer state."""
    state = torch.load(file, weights_only=False)
    states = state["last_optimizer_state"]["state"]
    experts = next(value for key, value in state["model"].items() if ".experts." in key)
    tensor = experts if part == "expert" else states[max(states)][part]
    tensor.view(-1)[-1] = torch.inf
    torch.save(state, written)


@LONG
@pytest.mark.parametrize(
    ("part", "flags"),
    [
        ("expert", ()),
        ("expert", ("--moe-checkpoint", "sharded")),
        ("exp_avg_sq", ("--moe-zero-stage", 1)),
        ("fp32_master", ("--bf16", "--moe-zero-stage", 1)),
    ],
)
def test_no_rank_trains_from_infinity_that_one_of_them_loaded(lm_data, tmp_path, part, flags):
    words = lm_args(lm_data, tmp_path / "save", *flags, updates=2)
    fairseq("train", *words, "--moe-checkpoint", "full", ranks=2)
    path, written = tmp_path / "save" / "checkpoint_last.pt", tmp_path / "written.pt"
    write_infinity(path, written, part)
    path.unlink()
    form = "sharded" if "sharded" in flags else "full"
    convert(form, "--input", written, "--output", path)
    run = wait(start("train", *words, "--max-update", 4, ranks=2))
    assert run.exit_codes == [1, 1]
    (sentence,) = {log.splitlines()[-1] for log in run.logs}
    assert re.search(rf" is {path}, in which .* on rank [01] is NaN, infinite", sentence)
