"""Checkpoints through the command line: any number of ranks, complete or absent."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli import USER_DIR, fairseq, refused, start, wait
from models import lm_args

from fairseq_tutel.plugin.training.save import writing

FAULTY = str(Path(__file__).parent / "faulty_user_dir")
SGD = ("--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.5, "--batch-size", 8)


def _load(folder, name="checkpoint_last.pt"):
    return torch.load(Path(folder) / name, weights_only=False)


def _train(data, folder, updates, ranks, freq, *extra):
    return fairseq(
        "train", *lm_args(data, folder, "--update-freq", freq, *extra, updates=updates), ranks=ranks
    )


@pytest.fixture(scope="module")
def straight(lm_data, tmp_path_factory):
    """The folder of a run of some seven updates, an epoch, on one rank."""
    folder = tmp_path_factory.mktemp("straight")
    _train(lm_data, folder, 0, 1, 4, *SGD, "--max-epoch", 1, "--save-interval-updates", 5)
    return folder


def test_two_ranks_then_one_then_three_train_like_one(lm_data, straight, tmp_path):
    _train(lm_data, tmp_path, 3, 2, 2, *SGD)
    _train(lm_data, tmp_path, 5, 1, 4, *SGD)
    expected, found = _load(straight, "checkpoint_1_5.pt"), _load(tmp_path)
    for name, tensor in expected["model"].items():
        torch.testing.assert_close(found["model"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    # Three ranks finish the epoch: every token of the corpus was seen once.
    _train(lm_data, tmp_path, 0, 3, 1, *SGD, "--max-epoch", 1)
    assert _tokens_of_epoch(_load(tmp_path)) == _tokens_of_epoch(_load(straight)) > 2000


def _tokens_of_epoch(checkpoint):
    train = dict(checkpoint["extra_state"]["metrics"])["train"]
    return next(float(state["sum"]) for _, name, _, state in train if name == "wpb")


# The fault, the number of ranks, the start of the last line, and the update of the last checkpoint.
FAULTS = {
    "memory": ("step:3:oom", 2, "error: rank 1 ran out of memory in the training step of update 2", 2),
    "NaN": ("step:4:nan", 2, "error: the loss or a gradient became NaN or infinite at update 3", 2),
    "full disk": ("save:2:full", 1, "error: .*checkpoint.* could not be written: ", 2),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_ends_every_rank_with_an_error_and_keeps_the_last_checkpoint(lm_data, tmp_path, case):
    fault, ranks, sentence, updates = FAULTS[case]
    args = lm_args(lm_data, tmp_path, "--user-dir", FAULTY, "--save-interval-updates", 2)
    run = wait(start("train", *args, ranks=ranks, env={"FAULT": fault, "FAULT_RANK": str(ranks - 1)}))
    assert all(code not in (0, None) for code in run.exit_codes)
    assert re.match(sentence, run.logs[ranks - 1].splitlines()[-1])
    assert _load(tmp_path)["optimizer_history"][-1]["num_updates"] == updates


def test_a_folder_of_another_run_is_refused_on_all_ranks(lm_data, tmp_path):
    """Also to a dense model; the other run is this process."""
    dense = [
        lm_data, "--user-dir", USER_DIR, "--task", "language_modeling", "--arch", "transformer_lm",
        "--optimizer", "adam", "--batch-size", 4, "--save-dir", tmp_path,
    ]  # fmt: skip
    with writing(str(tmp_path)):
        run = wait(start("train", *dense, ranks=2))
    assert run.exit_codes == [1, 1]
    for log in run.logs:
        sentence = f"--save-dir is {tmp_path}, where process {os.getpid()} on .* is training; give"
        assert re.search(sentence, log.splitlines()[-1])


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ((), "checkpoint_last.pt, which is corrupt"),
        (("--moe-freq", 2), "does not fit this model (Error(s) in loading state_dict"),
    ],
)
def test_a_truncated_checkpoint_and_one_of_another_model_are_refused(
    lm_data, straight, tmp_path, option, named
):
    path = shutil.copy(straight / "checkpoint_last.pt", tmp_path)
    if not option:
        os.truncate(path, 4096)
    output = refused("train", *lm_args(lm_data, tmp_path, *option))
    assert named in output and "Traceback" not in output
