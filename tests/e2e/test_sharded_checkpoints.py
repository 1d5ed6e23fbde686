"""Each rank writes its experts to a sharded checkpoint, and a run on any number of ranks can resume."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from cli import USER_DIR, fairseq, refused, start, wait
from equality import same_bits
from faults.trial import PLACES, Trial, environment
from models import lm_args
from tool_in_process import convert

from fairseq_tutel.checkpoint import folders as shard_folder
from fairseq_tutel.checkpoint.shards import bind, unbind

SHARDED = ("--moe-checkpoint", "sharded")
LONG = pytest.mark.long


def load(folder, name="checkpoint_last.pt"):
    """Return a checkpoint, including the experts that are in separate shard files."""
    path = Path(folder) / name
    state = torch.load(path, weights_only=False)
    bind(state, path)
    unbind(state)
    return state


def train(data, folder, updates, ranks, freq, *extra):
    args = lm_args(data, folder, "--update-freq", freq, *extra, updates=updates)
    return fairseq("train", *args, ranks=ranks)


ZERO = ("--moe-zero-stage", 2, "--moe-offload-optimizer")
# Each run has a number of ranks, an expert parallel size, and flags.
LAYOUTS = {
    "1 full": (1, 1, ()),
    "1 sharded": (1, 1, SHARDED),
    "2 full": (2, 2, ()),
    "2 sharded": (2, 2, SHARDED),
    "4 zero": (4, 2, (*SHARDED, *ZERO)),
    "4 sliced": (4, 4, SHARDED),
}
PAIRS = [
    ("1 full", "4 zero"),
    ("4 sliced", "1 sharded"),
    ("4 zero", "2 full"),
    pytest.param("2 sharded", "4 sliced", marks=LONG),
]


def train_at(name, data, folder, updates):
    ranks, size, how = LAYOUTS[name]
    parallel = ("--moe-expert-count", 2, "--moe-expert-parallel-size", size)
    return train(data, folder, updates, ranks, 4 // ranks, *parallel, *how)


@pytest.fixture(scope="module")
def saved_at(lm_data, tmp_path_factory):
    """Return a function that trains a run of `LAYOUTS` for two updates and returns the --save-dir."""
    folders = {}

    def of(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("saved")
            train_at(name, lm_data, folders[name], 2)
        return folders[name]

    return of


@pytest.fixture(scope="module")
def straight(lm_data, tmp_path_factory):
    """The losses and gradient norms of an uninterrupted run with four updates."""
    return losses(train_at("1 full", lm_data, tmp_path_factory.mktemp("straight"), 4))


def losses(run):
    return [(float(s["loss"]), float(s["gnorm"])) for s in run.stats("train_inner")]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_run_resumes_on_another_number_of_ranks_and_in_another_checkpoint_format(
    lm_data, tmp_path, saved_at, straight, saved, loaded
):
    folder = tmp_path / "copy"
    shutil.copytree(saved_at(saved), folder)
    run = train_at(loaded, lm_data, folder, 4)
    assert losses(run) == [pytest.approx(pair, abs=2e-3) for pair in straight[2:]]
    assert bool(LAYOUTS[loaded][2]) == ("experts/" in (folder / "checkpoint_last.pt").read_text("latin-1"))


def test_converting_a_sharded_checkpoint_to_a_full_checkpoint_keeps_all_bits(lm_data, tmp_path, saved_at):
    convert("full", "--input", saved_at("4 sliced") / "checkpoint_last.pt", "--output", tmp_path / "a.pt")
    files = saved_at("4 sliced") / "checkpoint_last.pt", tmp_path / "a.pt"
    full, sharded = (load(path.parent, path.name) for path in files)
    same_bits(full["model"], sharded["model"])
    same_bits(full["last_optimizer_state"]["state"], sharded["last_optimizer_state"]["state"])
    perplexities = []
    for path in files:
        run = fairseq(
            "eval-lm", lm_data, "--user-dir", USER_DIR, "--path", path,
            "--tokens-per-sample", 16, "--batch-size", 8,
        )  # fmt: skip
        perplexities += re.findall(r"Perplexity: ([\d.]+)", run.output)
    assert len(perplexities) == 2 and perplexities[0] == perplexities[1]


def test_a_bf16_run_resumes_bit_for_bit_and_deletes_unused_shards(lm_data, tmp_path):
    options = ("--dropout", 0.1, "--bf16", *SHARDED, "--disable-validation")
    keep = ("--save-interval-updates", 2, "--keep-interval-updates", 2)
    train(lm_data, tmp_path / "a", 6, 2, 1, *options, *keep)
    a = load(tmp_path / "a")
    files = sorted(path.name for path in (tmp_path / "a").glob("*.pt"))
    assert files == ["checkpoint_1_4.pt", "checkpoint_1_6.pt", "checkpoint_last.pt"]
    named = {name for file in files for name in shard_folder.mentions(tmp_path / "a" / file)}
    assert {path.name for path in (tmp_path / "a" / "experts").iterdir()} == named
    restore = ("--restore-file", tmp_path / "a" / "checkpoint_1_4.pt")
    train(lm_data, tmp_path / "b", 6, 2, 1, *options, *restore)
    b = load(tmp_path / "b")
    same_bits(a["model"], b["model"])
    same_bits(a["last_optimizer_state"]["state"], b["last_optimizer_state"]["state"])
    assert all("fp32_master" in entry for entry in a["last_optimizer_state"]["state"].values())


def test_a_checkpoint_with_a_damaged_expert_shard_is_refused(lm_data, tmp_path, saved_at):
    folder = tmp_path / "copy"
    shutil.copytree(saved_at("4 sliced"), folder)
    (shards,) = (folder / "experts").iterdir()
    for file in shards.iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    output = refused("train", *lm_args(lm_data, folder, "--moe-expert-count", 2, *SHARDED))
    assert "differs from the saved tensor" in output.splitlines()[-1]


def test_all_ranks_name_the_rank_that_cannot_write_its_experts(lm_data, tmp_path):
    args = lm_args(lm_data, tmp_path / "save", "--user-dir", PLACES, "--save-interval-updates", 2, *SHARDED)
    trial = Trial(what="error", place="shard", when=3, rank=1)
    run = wait(start("train", *args, ranks=2, env=environment(tmp_path, trial)))
    assert all(code not in (0, None) for code in run.exit_codes)
    for log in run.logs:
        assert "rank 1 could not write its experts to" in log
    assert load(tmp_path / "save")["optimizer_history"][-1]["num_updates"] == 2
