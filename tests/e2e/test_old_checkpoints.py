"""Runs resume from checkpoints that an older version of the plugin wrote after three updates.

The losses of updates 4 and 5 must equal the losses that the older version logged.
"""

import tarfile
from pathlib import Path

import pytest
from cli import fairseq
from models import lm_args

ARCHIVE = Path(__file__).parent / "old_checkpoints.tar.xz"
SHARDED = ("--moe-checkpoint", "sharded")
ZERO = (*SHARDED, "--moe-zero-stage", 2, "--moe-expert-parallel-size", 1, "--bf16")


@pytest.mark.parametrize(
    ("name", "ranks", "flags", "losses", "norms"),
    [
        ("full", 1, (), (5.67, 5.575), (0.642, 0.639)),
        ("sharded", 2, SHARDED, (5.67, 5.575), (0.642, 0.639)),
        ("zero", 2, ZERO, (5.67, 5.574), (0.641, 0.635)),
    ],
)
def test_runs_resume_from_an_old_plugin_s_checkpoint(lm_data, tmp_path, name, ranks, flags, losses, norms):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    args = lm_args(lm_data, tmp_path / name, "--update-freq", 4 // ranks, *flags, updates=5)
    updates = fairseq("train", *args, ranks=ranks).stats("train_inner")
    assert [u["num_updates"] for u in updates] == ["4", "5"]
    # The last logged digit may differ, because the order of sums depends on the processor.
    assert [float(u["loss"]) for u in updates] == pytest.approx(losses, abs=2e-3)
    assert [float(u["gnorm"]) for u in updates] == pytest.approx(norms, abs=2e-3)
