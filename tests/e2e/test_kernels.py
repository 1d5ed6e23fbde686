"""Runs one training with each kernel backend through the command line and compares losses and logs."""

import os
import subprocess
import sys

import pytest
import torch
from cli import ROOT, TIMEOUT_S, fairseq
from models import lm_args

TINY = (
    "--moe-expert-count", 4, "--moe-capacity-factor", 0.8, "--max-update", 2,
    "--optimizer", "moe_sgd", "--lr", 0.5, "--tokens-per-sample", 8, "--batch-size", 3,
    "--disable-validation",
)  # fmt: skip
INTERPRETED = """
import interpreter
interpreter.interpret()
from fairseq_cli.train import cli_main
cli_main()
"""


def trained(data, save, *extra):
    """Train, and return (the model's state dict, what was printed)."""
    run = fairseq("train", *lm_args(data, save, *TINY, *extra))
    return torch.load(save / "checkpoint_last.pt", weights_only=False)["model"], run.output


def interpreted(data, save, *extra):
    """Return the same of a process of its own: Triton decides at its import whether it interprets."""
    words = map(str, lm_args(data, save, *TINY, *extra))
    path = os.pathsep.join([str(ROOT / "tests" / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=save.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return torch.load(save / "checkpoint_last.pt", weights_only=False)["model"], output


@pytest.mark.parametrize(
    "train, extra",
    [(interpreted, ("--moe-backend", "triton")), (trained, ("--moe-recompute-experts",))],
    ids=("triton", "recomputed"),
)
def test_a_training_is_the_same_by_every_kernel(lm_data, tmp_path, train, extra):
    expected, _ = trained(lm_data, tmp_path / "reference")
    found, output = train(lm_data, tmp_path / "other", *extra)
    assert ("triton kernels" in output) == ("triton" in extra)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
