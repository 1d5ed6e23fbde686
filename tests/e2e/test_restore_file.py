"""Selects the checkpoint to resume from if each rank has a different --save-dir or --restore-file."""

import re
import shutil

import pytest
from cli import fairseq, start_each, wait
from models import lm_args


@pytest.fixture(scope="module")
def saved(lm_data, tmp_path_factory):
    """The folders of two training runs with two updates each."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, folder in enumerate(folders, start=1):
        fairseq("train", *lm_args(lm_data, folder, "--seed", seed, updates=2))
    return folders


def test_ranks_with_different_checkpoints_are_refused(lm_data, tmp_path, saved):
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


def test_a_run_without_a_last_checkpoint_resumes_from_the_newest(lm_data, tmp_path, saved):
    """This happens if the disk is full when fairseq copies the file. The ranks' folders may be copies."""
    for name in ("a", "b"):
        shutil.copytree(saved[0], tmp_path / name)
        (tmp_path / name / "checkpoint_last.pt").unlink()
    run = wait(start_each("train", *(lm_args(lm_data, tmp_path / name, updates=3) for name in ("a", "b"))))
    assert run.exit_codes == [0, 0]
    assert "training resumes from checkpoint_best.pt (update 2)" in run.logs[0]
    assert "(epoch 1 @ 2 updates)" in run.logs[0]
