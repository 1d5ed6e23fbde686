"""Kernels through the real command line: the same training by every backend, and what is said of them.

Covered: Triton, interpreted on a CPU, and torch's grouped products against the reference, loss and weights;
hidden layers made again in backward; what cannot run refused.
"""

import pytest
import torch
from cli import fairseq, refused
from models import lm_args

TINY = (
    "--moe-expert-count", 4, "--moe-capacity-factor", 0.8, "--max-update", 2,
    "--optimizer", "moe_sgd", "--lr", 0.5,
)  # fmt: skip


def trained(data, save, *extra, **more):
    run = fairseq("train", *lm_args(data, save, *TINY, *extra), **more)
    return torch.load(save / "checkpoint_last.pt", weights_only=False)["model"], run


@pytest.mark.parametrize(
    "extra, env",
    [
        (("--moe-backend", "triton"), {"TRITON_INTERPRET": "1"}),
        (("--moe-backend", "grouped_mm", "--moe-recompute-experts"), None),
    ],
    ids=("triton", "grouped_mm"),
)
def test_a_training_is_the_same_by_every_backend(lm_data, tmp_path, extra, env):
    expected, _ = trained(lm_data, tmp_path / "reference")
    found, run = trained(lm_data, tmp_path / "other", *extra, env=env)
    assert extra[1] in run.output
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_triton_without_a_gpu_is_refused_by_a_sentence(lm_data, tmp_path):
    said = refused("train", *lm_args(lm_data, tmp_path, "--moe-backend", "triton"))
    assert "--moe-backend) is 'triton' but the tensors are on cpu; run on a GPU" in said


def test_a_negative_tuning_budget_is_refused_by_a_sentence(lm_data, tmp_path):
    said = refused("train", *lm_args(lm_data, tmp_path, "--moe-kernel-tuning-seconds", -1))
    assert "--moe-kernel-tuning-seconds) is -1.0; give a finite number, at least 0" in said
