"""A failed training run keeps its last checkpoint, and training refuses an unsuitable checkpoint."""

import os
import re
import shutil

import pytest
import torch
from cli import USER_DIR, fairseq, refused, start, wait
from faults.trial import PLACES, Trial, environment
from models import lm_args

from fairseq_tutel.plugin.training.save import writing

# Each entry has the fault to inject into training, and a pattern of the last log line.
FAULTS = {
    "memory": (
        Trial(what="oom", place="train", when=3, rank=1),
        "error: rank 1 ran out of memory in the training step of update 2",
    ),
    "NaN": (
        Trial(what="nan", place="train", when=4, rank=1),
        "error: the loss or a gradient became NaN or infinite at update 3",
    ),
    "full disk": (
        Trial(what="full", place="write", when=2),
        "error: .*checkpoint.* could not be written: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_after_a_fault_all_ranks_end_with_an_error_and_the_last_checkpoint_remains(lm_data, tmp_path, case):
    trial, sentence = FAULTS[case]
    args = lm_args(lm_data, tmp_path / "save", "--user-dir", PLACES, "--save-interval-updates", 2)
    run = wait(start("train", *args, ranks=1 + trial.rank, env=environment(tmp_path, trial)))
    assert all(code not in (0, None) for code in run.exit_codes)
    assert re.match(sentence, run.logs[trial.rank].splitlines()[-1])
    saved = torch.load(tmp_path / "save" / "checkpoint_last.pt", weights_only=False)
    assert saved["optimizer_history"][-1]["num_updates"] == 2


def test_a_save_dir_that_another_run_uses_is_refused_on_all_ranks(lm_data, tmp_path):
    """The test process locks --save-dir, so the plugin refuses a training run, even of a dense model."""
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


@pytest.fixture(scope="module")
def saved(lm_data, tmp_path_factory):
    """The checkpoint of a language model after one update."""
    folder = tmp_path_factory.mktemp("saved")
    fairseq("train", *lm_args(lm_data, folder, "--disable-validation", updates=1))
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ((), "checkpoint_last.pt, which is corrupt"),
        (("--moe-freq", 2), "does not fit this model (Error(s) in loading state_dict"),
    ],
)
def test_a_truncated_checkpoint_or_one_of_another_model_is_refused(lm_data, saved, tmp_path, option, named):
    path = shutil.copy(saved, tmp_path)
    if not option:
        os.truncate(path, 4096)
    output = refused("train", *lm_args(lm_data, tmp_path, *option))
    assert named in output and "Traceback" not in output
