"""Checkpoints of an older tree train on: full, sharded on 2 ranks, ZeRO 2 whose masters are in shards.

Three updates are in the archive; the fourth and fifth are compared with those of the older tree.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from cli import USER_DIR, fairseq
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
def test_an_older_checkpoint_trains_on(lm_data, tmp_path, name, ranks, flags, losses, norms):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    args = lm_args(lm_data, tmp_path / name, "--update-freq", 4 // ranks, *flags, updates=5)
    updates = fairseq("train", *args, ranks=ranks).stats("train_inner")
    assert [u["num_updates"] for u in updates] == ["4", "5"]
    # Another processor sums in another order: the last digit that is logged may differ.
    assert [float(u["loss"]) for u in updates] == pytest.approx(losses, abs=2e-3)
    assert [float(u["gnorm"]) for u in updates] == pytest.approx(norms, abs=2e-3)


def test_a_checkpoint_with_a_removed_option_trains_on_with_the_same_bits_and_opens(lm_data, tmp_path):
    key, trained = "moe_kernel_tuning_seconds", []
    for folder, has_key in ((tmp_path / "with", True), (tmp_path / "without", False)):
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        path = folder / "full" / "checkpoint_last.pt"
        state = torch.load(path, weights_only=False)
        assert key in state["cfg"]["task"]
        if not has_key:
            del state["cfg"]["task"][key]
            torch.save(state, path)
        words = ("--user-dir", USER_DIR, "--path", path, "--gen-subset", "valid", "--cpu")
        runs = [fairseq("eval-lm", lm_data, *words)]
        runs += [fairseq("train", *lm_args(lm_data, path.parent, "--update-freq", 4, updates=5))]
        assert [run.output.count(key) for run in runs] == [has_key, has_key]
        trained.append((torch.load(path, weights_only=False), runs[0].output.split("Loss (base 2)")[1]))
    (old, old_loss), (new, new_loss) = trained
    assert key not in old["cfg"]["task"] and old_loss == new_loss
    for part in (lambda state: state["model"], lambda state: state["last_optimizer_state"]):
        torch.testing.assert_close(part(old), part(new), rtol=0, atol=0)
