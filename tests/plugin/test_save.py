"""A training has its --save-dir to itself. Of several ranks: tests/e2e/test_checkpoints.py."""

import os
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from leases import ELSEWHERE, leave

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint import folders, lease
from fairseq_tutel.files.atomic import temporary_of
from fairseq_tutel.plugin.training import save

plugin.register()


@pytest.fixture(autouse=True)
def _sound(monkeypatch):
    """The trainers here have no weights; tests/plugin/test_finite.py looks at those."""
    monkeypatch.setattr(save.finite, "refuse_to_save", lambda trainer: None)


def config(folder, no_save=False):
    checkpoint = SimpleNamespace(
        save_dir=str(folder), no_save=no_save, restore_file="checkpoint_last.pt", continue_once=None,
        finetune_from_model=None, checkpoint_suffix="",
    )  # fmt: skip
    distributed = SimpleNamespace(use_sharded_state=False)
    return SimpleNamespace(checkpoint=checkpoint, distributed_training=distributed)


@pytest.mark.parametrize("no_save", [False, True])
def test_main_runs_with_the_lease_and_leaves_none(tmp_path, no_save):
    seen = []

    def main(cfg, **kwargs):
        seen.append((kwargs, sorted(os.listdir(tmp_path))))
        return 3

    assert save.run_training(main, config(tmp_path, no_save), a=1) == 3
    assert seen == [({"a": 1}, [] if no_save else [lease.NAME])]
    assert os.listdir(tmp_path) == []


def test_an_error_of_main_releases_the_lease(tmp_path):
    def main(cfg):
        raise KeyError("a broken sample")

    with pytest.raises(KeyError):
        save.run_training(main, config(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_lease_that_cannot_be_written_is_said_in_a_sentence(tmp_path):
    (tmp_path / "save").write_text("a file")
    with pytest.raises(ValueError, match=r"--save-dir is .*save, in which .* \(File exists\)"):
        save.run_training(pytest.fail, config(tmp_path / "save"))


@pytest.mark.parametrize("after_a_kill", [True, False])
def test_what_was_cut_off_goes_when_its_writer_is_known_to_be_gone(tmp_path, monkeypatch, after_a_kill):
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.0)
    if after_a_kill:
        leave(str(tmp_path), ELSEWHERE, seconds=1000)
    folders.begin(tmp_path)
    for name in (temporary_of("checkpoint_last.pt"), "of_another.tmp", "a.pt"):
        (tmp_path / name).write_text("half")
    with save.writing(str(tmp_path)):
        left = sorted(set(os.listdir(tmp_path)) - {"experts", lease.NAME})
        assert len(left) == (2 if after_a_kill else 3)
        assert {"a.pt", "of_another.tmp"} <= set(left)
        assert len(os.listdir(tmp_path / "experts")) == (0 if after_a_kill else 1)


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_an_error_leaves_no_experts_without_a_checkpoint_unless_the_folder_is_another_run_s(
    tmp_path, is_taken_over
):
    with pytest.raises(OSError, match="a full disk"), save.writing(str(tmp_path)):
        folders.commit(folders.begin(tmp_path), [])
        if is_taken_over:
            leave(str(tmp_path), ELSEWHERE)
        raise OSError("a full disk")
    assert len(os.listdir(tmp_path / "experts")) == is_taken_over


def test_nothing_is_saved_over_another_training(tmp_path):
    saved, cfg = [], SimpleNamespace(no_save=False, no_save_optimizer_state=True)
    saves = save.save_checkpoint(lambda *_: saved.append(1))
    task = SimpleNamespace(args=None)
    trainer = SimpleNamespace(optimizer=None, get_model=torch.nn.Module, task=task)
    with save.writing(str(tmp_path)):
        saves(cfg, trainer, None, None)
        leave(str(tmp_path), ELSEWHERE)
        with pytest.raises(ValueError, match="which process 12 on node7 has taken over"):
            saves(cfg, trainer, None, None)
    assert saved == [1]


def test_a_copy_goes_where_a_link_leads_and_is_on_the_disk(tmp_path, monkeypatch):
    synced, stock = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino) or stock(file))
    source, target, link = (tmp_path / name for name in ("source", "target", "link"))
    source.write_text("new")
    target.write_text("old")
    link.symlink_to(target)
    assert save.copy(checkpoint_utils.PathManager.copy)(str(source), str(link), True)
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_ino in synced
