"""The file that a training goes on from, where every rank has a --save-dir or --restore-file of its own."""

import re
import shutil

import pytest
from cli import fairseq, refused, start_each, wait
from models import lm_args


@pytest.fixture(scope="module")
def saved(lm_data, tmp_path_factory):
    """Two folders of two trainings of two updates."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, folder in enumerate(folders, start=1):
        fairseq("train", *lm_args(lm_data, folder, "--seed", seed, updates=2))
    return folders


@pytest.mark.parametrize(("of_rank_1", "experts"), [("nothing", 0), ("another", 1)])
def test_ranks_that_would_go_on_from_different_places_are_refused(
    lm_data, tmp_path, saved, of_rank_1, experts
):
    first, second = tmp_path / "a", tmp_path / "b"
    shutil.copytree(saved[0], first)
    if of_rank_1 == "another":
        shutil.copytree(saved[1], second)
    alike = ("--moe-expert-parallel-size", experts, "--moe-comm-timeout", 20)
    run = wait(start_each("train", *(lm_args(lm_data, folder, *alike) for folder in (first, second))))
    assert run.exit_codes == [1, 1]
    sentence = (
        r"checkpoint_last\.pt, which is a checkpoint on rank 0, but rank 1 found something else; give"
    )
    for log in run.logs:
        assert re.search(f"error: --restore-file is .*{sentence}", log.splitlines()[-1])


def test_a_training_goes_on_from_what_is_there_where_the_last_file_is_not(lm_data, tmp_path, saved):
    """As after a disk that was full for the copy; the ranks' folders may be copies."""
    for name in ("a", "b"):
        shutil.copytree(saved[0], tmp_path / name)
        (tmp_path / name / "checkpoint_last.pt").unlink()
    run = wait(start_each("train", *(lm_args(lm_data, tmp_path / name, updates=3) for name in ("a", "b"))))
    assert run.exit_codes == [0, 0]
    assert "training resumes from checkpoint_best.pt (update 2)" in run.logs[0]
    assert "(epoch 1 @ 2 updates)" in run.logs[0]


@pytest.mark.parametrize("flag", ["--finetune-from-model", "--continue-once"])
def test_a_file_to_begin_with_that_is_nowhere_is_refused(lm_data, tmp_path, flag):
    output = refused("train", *lm_args(lm_data, tmp_path, flag, "nowhere.pt"))
    assert f"{flag} is nowhere.pt, which does not exist; give an existing" in output
