"""A training run locks the folder `--save-dir`, and removes incomplete files from this folder."""

import errno
import os
from types import SimpleNamespace

import pytest

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint import folders, lock
from fairseq_tutel.checkpoint.lock import NAME
from fairseq_tutel.files import temporary_of
from fairseq_tutel.plugin.training import save

plugin.register()


@pytest.fixture(autouse=True)
def _sound(monkeypatch):
    """Disable the search for NaN in weights, because the tests of locks have no model."""
    monkeypatch.setattr(save.finite, "refuse_to_save", lambda trainer: None)


def config(folder, no_save=False):
    checkpoint = SimpleNamespace(
        save_dir=str(folder), no_save=no_save, restore_file="checkpoint_last.pt", continue_once=None,
        finetune_from_model=None, checkpoint_suffix="",
    )  # fmt: skip
    distributed = SimpleNamespace(use_sharded_state=False)
    return SimpleNamespace(checkpoint=checkpoint, distributed_training=distributed)


@pytest.mark.parametrize("no_save", [False, True])
def test_fairseq_s_main_function_runs_while_save_dir_is_locked(tmp_path, no_save):
    seen = []

    def main(cfg, **kwargs):
        seen.append((kwargs, sorted(os.listdir(tmp_path))))
        return 3

    assert save.run_training(main, config(tmp_path, no_save), a=1) == 3
    assert seen == [({"a": 1}, [] if no_save else [NAME])]


def test_the_error_for_a_lock_that_cannot_be_written_names_save_dir(tmp_path):
    (tmp_path / "save").write_text("a file")
    with pytest.raises(ValueError, match=r"--save-dir is .*save, in which .* \(File exists\)"):
        save.run_training(pytest.fail, config(tmp_path / "save"))


@pytest.mark.parametrize("has_locks", [True, False])
def test_incomplete_files_are_removed_only_if_the_file_system_has_locks(tmp_path, monkeypatch, has_locks):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    if not has_locks:
        monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    folders.begin(tmp_path)
    for name in (temporary_of("checkpoint_last.pt"), "of_another.tmp", "a.pt"):
        (tmp_path / name).write_text("half")
    with save.writing(str(tmp_path)):
        left = sorted(set(os.listdir(tmp_path)) - {"experts", NAME})
        assert len(left) == (2 if has_locks else 3)
        assert {"a.pt", "of_another.tmp"} <= set(left)
        assert len(os.listdir(tmp_path / "experts")) == (0 if has_locks else 1)


def test_expert_folders_without_a_checkpoint_are_removed_after_an_error(tmp_path):
    with pytest.raises(OSError, match="a full disk"), save.writing(str(tmp_path)):
        folders.commit(folders.begin(tmp_path), [])
        raise OSError("a full disk")
    assert os.listdir(tmp_path / "experts") == []
