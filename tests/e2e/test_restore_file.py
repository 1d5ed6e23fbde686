"""Tests of the checkpoint from which a run resumes if each rank has a different --save-dir."""

import re
import shutil

import pytest
from cli import fairseq, start_each, wait
from models import lm_args


@pytest.fixture(scope="module")
def saved(lm_data, tmp_path_factory):
    """The --save-dir of each of two training runs with different seeds."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, folder in enumerate(folders, start=1):
        fairseq("train", *lm_args(lm_data, folder, "--seed", seed, updates=2))
    return folders


def test_a_run_is_refused_if_its_ranks_have_different_checkpoints(lm_data, tmp_path, saved):
    first, second = tmp_path / "a", tmp_path / "b"
    shutil.copytree(saved[0], first)
    shutil.copytree(saved[1], second)
    run = wait(start_each("train", *(lm_args(lm_data, folder) for folder in (first, second))))
    assert run.exit_codes == [1, 1]
    sentence = (
        r"checkpoint_last\.pt, which is a checkpoint on rank 0, but rank 1 found something else; give"
    )
    for log in run.logs:
        assert re.search(f"error: --restore-file is .*{sentence}", log.splitlines()[-1])


def test_a_run_without_checkpoint_last_resumes_from_the_newest_checkpoint(lm_data, tmp_path, saved):
    """A full disk can stop fairseq from writing checkpoint_last.pt."""
    for name in ("a", "b"):
        shutil.copytree(saved[0], tmp_path / name)
        (tmp_path / name / "checkpoint_last.pt").unlink()
    run = wait(start_each("train", *(lm_args(lm_data, tmp_path / name, updates=3) for name in ("a", "b"))))
    assert run.exit_codes == [0, 0]
    assert "training resumes from checkpoint_best.pt (update 2)" in run.logs[0]
    assert "(epoch 1 @ 2 updates)" in run.logs[0]
