"""Every command refuses a checkpoint whose options contain code."""

import pytest
import torch
from cli import USER_DIR, fairseq, refused
from models import lm_args

import fairseq_tutel


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
