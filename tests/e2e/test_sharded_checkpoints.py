"""Sharded checkpoints through the command line: each rank writes its experts, any run reads them."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli import USER_DIR, fairseq, refused, start, wait
from equality import same_bits
from models import lm_args
from tool_in_process import convert

from fairseq_tutel.checkpoint import folders as shard_folder
from fairseq_tutel.checkpoint.shards import bind, is_record, unbind

FAULTY = str(Path(__file__).parent / "faulty_user_dir")
SHARDED = ("--moe-checkpoint", "sharded")


def load(folder, name="checkpoint_last.pt"):
    """Return a checkpoint with its experts read from their shards."""
    path = Path(folder) / name
    state = torch.load(path, weights_only=False)
    bind(state, path)
    unbind(state)
    return state


def train(data, folder, updates, ranks, freq, *extra):
    args = lm_args(data, folder, "--update-freq", freq, *extra, updates=updates)
    return fairseq("train", *args, ranks=ranks)


@pytest.mark.parametrize("ranks, size", [(1, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_the_shards_hold_the_bits_of_a_full_checkpoint(lm_data, tmp_path, ranks, size):
    parallel = ("--moe-expert-parallel-size", size)
    train(lm_data, tmp_path / "full", 3, ranks, 1, *parallel)
    train(lm_data, tmp_path / "sharded", 3, ranks, 1, *parallel, *SHARDED)
    full, sharded = load(tmp_path / "full"), load(tmp_path / "sharded")
    same_bits(full["model"], sharded["model"])
    same_bits(full["last_optimizer_state"]["state"], sharded["last_optimizer_state"]["state"])
    (shards,) = (tmp_path / "sharded" / "experts").iterdir()
    assert len(list(shards.iterdir())) == 2 * ranks  # two layers, a file of each rank


# (ranks, P, format): one rank; experts on each rank; replicas; two ranks for an expert.
PLACES = {
    "1 full": (1, 1, ()),
    "1 sharded": (1, 1, SHARDED),
    "2": (2, 2, SHARDED),
    "2 full": (2, 2, ()),
    "4 by 2": (4, 2, SHARDED),
    "4 sliced": (4, 4, SHARDED),
    "4 sliced full": (4, 4, ()),
}
QUICK = {("1 full", "4 sliced"), ("4 sliced", "1 sharded"), ("4 by 2", "2 full")}


def matrix():
    """Return every pair of places as a test case; all but the quick ones are long."""
    return [
        pytest.param(saved, loaded, marks=() if (saved, loaded) in QUICK else pytest.mark.long)
        for saved in PLACES
        for loaded in PLACES
    ]


def train_at(name, data, folder, updates, *extra):
    ranks, size, how = PLACES[name]
    parallel = ("--moe-expert-count", 2, "--moe-expert-parallel-size", size)
    return train(data, folder, updates, ranks, 4 // ranks, *parallel, *how, *extra)


@pytest.fixture(scope="module")
def saved_at(lm_data, tmp_path_factory):
    """Return a function from a place to the folder of three updates there."""
    folders = {}

    def of(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("saved")
            train_at(name, lm_data, folders[name], 3)
        return folders[name]

    return of


@pytest.fixture(scope="module")
def straight(lm_data, tmp_path_factory):
    """Return what five updates without a stop log."""
    return losses(train_at("1 full", lm_data, tmp_path_factory.mktemp("straight"), 5))


def losses(run):
    return [(float(s["loss"]), float(s["gnorm"])) for s in run.stats("train_inner")]


@pytest.mark.parametrize("saved, loaded", matrix())
def test_saved_anywhere_goes_on_anywhere(lm_data, tmp_path, saved_at, straight, saved, loaded):
    folder = tmp_path / "copy"
    shutil.copytree(saved_at(saved), folder)
    run = train_at(loaded, lm_data, folder, 5)
    assert losses(run) == [pytest.approx(pair, abs=2e-3) for pair in straight[3:]]
    assert bool(PLACES[loaded][2]) == ("experts/" in (folder / "checkpoint_last.pt").read_text("latin-1"))


@pytest.mark.parametrize(
    "saved, form", [("2 full", "sharded"), pytest.param("4 sliced", "full", marks=pytest.mark.long)]
)
def test_a_converted_checkpoint_goes_on(lm_data, tmp_path, saved_at, straight, saved, form):
    source, target = saved_at(saved) / "checkpoint_last.pt", tmp_path / "checkpoint_last.pt"
    convert(form, "--input", source, "--output", target)
    assert (tmp_path / "experts").exists() == (form == "sharded")
    same_bits(load(source.parent)["model"], load(tmp_path)["model"])
    run = train_at("2", lm_data, tmp_path, 5)
    assert losses(run) == [pytest.approx(pair, abs=2e-3) for pair in straight[3:]]


def test_a_resume_continues_bit_for_bit_with_its_masters(lm_data, tmp_path):
    options = ("--dropout", 0.1, "--bf16", *SHARDED)
    train(lm_data, tmp_path / "a", 6, 2, 1, *options)
    train(lm_data, tmp_path / "b", 3, 2, 1, *options)
    train(lm_data, tmp_path / "b", 6, 2, 1, *options)
    a, b = load(tmp_path / "a"), load(tmp_path / "b")
    same_bits(a["model"], b["model"])
    same_bits(a["last_optimizer_state"]["state"], b["last_optimizer_state"]["state"])
    assert all("fp32_master" in entry for entry in a["last_optimizer_state"]["state"].values())


def test_files_that_fairseq_removes_take_their_shards_along(lm_data, tmp_path):
    keep = ("--save-interval-updates", 1, "--keep-interval-updates", 1)
    run = train(lm_data, tmp_path, 5, 2, 1, *SHARDED, *keep)
    assert run.output.count("Finished saving checkpoint") >= 5
    files = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert files == ["checkpoint_1_5.pt", "checkpoint_best.pt", "checkpoint_last.pt"]
    named = {name for file in files for name in shard_folder.mentions(tmp_path / file)}
    held = {path.name for path in (tmp_path / "experts").iterdir()}
    assert named <= held
    assert len(held) <= len(named) + 1  # what the last removal freed goes with the next save
    for file in files:
        assert load(tmp_path, file)["model"]


@pytest.mark.long
def test_a_model_without_its_optimizer_is_enough_to_go_on_from(lm_data, tmp_path):
    train(lm_data, tmp_path / "a", 3, 2, 1, *SHARDED, "--no-save-optimizer-state")
    first = tmp_path / "a" / "checkpoint_last.pt"
    assert "last_optimizer_state" not in torch.load(first, weights_only=False)
    finetune = ("--finetune-from-model", first, *SHARDED)
    run = train(lm_data, tmp_path / "b", 2, 1, 2, *finetune)
    restore = ("--restore-file", first, "--reset-optimizer", "--reset-dataloader", "--reset-meters")
    again = train(lm_data, tmp_path / "c", 2, 2, 1, *restore, *SHARDED)
    assert losses(run)[0] == pytest.approx(losses(again)[0], abs=2e-3)


def test_other_commands_open_it(lm_data, saved_at):
    perplexities = []
    for place in ("2", "2 full"):
        path = saved_at(place) / "checkpoint_last.pt"
        run = fairseq(
            "eval-lm", lm_data, "--user-dir", USER_DIR, "--path", path,
            "--tokens-per-sample", 16, "--batch-size", 8,
        )  # fmt: skip
        perplexities += re.findall(r"Perplexity: ([\d.]+)", run.output)
    assert len(perplexities) == 2
    assert perplexities[0] == perplexities[1]


def test_a_damaged_shard_is_refused(lm_data, tmp_path, saved_at):
    folder = tmp_path / "copy"
    shutil.copytree(saved_at("1 sharded"), folder)
    (shards,) = (folder / "experts").iterdir()
    for file in shards.iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    output = refused("train", *lm_args(lm_data, folder, "--moe-expert-count", 2, *SHARDED))
    assert "differs from the saved tensor" in output.splitlines()[-1]


def test_a_full_disk_names_the_rank_and_costs_no_checkpoint(lm_data, tmp_path):
    many = ("--moe-expert-count", 16, "--save-interval-updates", 2)
    args = lm_args(lm_data, tmp_path, "--user-dir", FAULTY, *many, *SHARDED)
    run = wait(start("train", *args, ranks=2, env={"FAULT": "step:3:full", "FAULT_RANK": "1"}))
    assert all(code not in (0, None) for code in run.exit_codes)
    for log in run.logs:
        assert "rank 1 could not write its experts to" in log
    assert load(tmp_path)["optimizer_history"][-1]["num_updates"] == 2
    named = set().union(*map(shard_folder.mentions, tmp_path.glob("*.pt")))
    assert set(os.listdir(tmp_path / shard_folder.PARENT)) == named  # the others would fill the disk


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_experts_state_that_zero_cuts_is_in_the_shards_alone(lm_data, tmp_path, size):
    zero = ("--moe-zero-stage", 1, "--moe-expert-parallel-size", size)
    train(lm_data, tmp_path, 1, 2, 1, *zero, *SHARDED)
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["last_optimizer_state"]
    moments = [entry[key] for entry in state["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    assert sum(map(is_record, moments)) == 2 * 8  # of four tensors in each of two layers


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2])
def test_state_that_zero_cuts_is_saved_and_read(lm_data, tmp_path, straight, stage):
    zero = ("--moe-zero-stage", stage, "--moe-offload-optimizer")
    saved, copy = tmp_path / "saved", tmp_path / "copy"
    train_at("4 by 2", lm_data, saved, 3, *zero)
    state = load(saved)["last_optimizer_state"]["state"].values()
    assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in state)
    places = [("2 full", ()), ("4 by 2", zero)]
    for place, extra in places[: 3 - stage]:  # the second one in the long test alone
        shutil.copytree(saved, copy)
        run = train_at(place, lm_data, copy, 5, *extra)
        assert losses(run) == [pytest.approx(pair, abs=2e-3) for pair in straight[3:]]
        shutil.rmtree(copy)
