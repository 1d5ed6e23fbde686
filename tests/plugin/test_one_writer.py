"""A training has its --save-dir to itself: dense ones too, and what one that was killed left is removed.

Covered: main runs with the lease and leaves none; no lease where nothing is written; what was cut off; a
save after the lease was lost. Of several ranks: tests/e2e/test_checkpoints.py.
"""

import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from fairseq_cli import train
from leases import ELSEWHERE, leave

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint import files, folders, lease
from fairseq_tutel.plugin import one_writer, wrapped

plugin.register()


def config(folder, no_save=False):
    return SimpleNamespace(checkpoint=SimpleNamespace(save_dir=str(folder), no_save=no_save))


def test_a_main_can_be_sent_to_a_spawned_rank():
    assert pickle.loads(pickle.dumps(one_writer.OneWriter(train.main))).main is train.main


@pytest.mark.parametrize("no_save", [False, True])
def test_main_runs_with_the_lease_and_leaves_none(tmp_path, no_save):
    seen = []

    def main(cfg, **kwargs):
        seen.append((kwargs, sorted(os.listdir(tmp_path))))
        return 3

    assert one_writer.OneWriter(main)(config(tmp_path, no_save), a=1) == 3
    assert seen == [({"a": 1}, [] if no_save else [lease.NAME])]
    assert os.listdir(tmp_path) == []


def test_an_error_of_main_releases_the_lease(tmp_path):
    def main(cfg):
        raise KeyError("a broken sample")

    with pytest.raises(KeyError):
        one_writer.OneWriter(main)(config(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_lease_that_cannot_be_written_is_said_in_a_sentence(tmp_path):
    (tmp_path / "save").write_text("a file")
    with pytest.raises(ValueError, match=r"save/writer\.lease could not be written: File exists"):
        one_writer.OneWriter(pytest.fail)(config(tmp_path / "save"))


@pytest.mark.parametrize("after_a_kill", [True, False])
def test_what_was_cut_off_goes_when_its_writer_is_known_to_be_gone(
    tmp_path, monkeypatch, after_a_kill
):
    monkeypatch.setattr(lease, "SETTLE_SECONDS", 0.0)
    if after_a_kill:
        leave(str(tmp_path), ELSEWHERE, seconds=1000)
    folders.begin(tmp_path)
    for name in (files.temporary_of("checkpoint_last.pt"), "of_another.tmp", "a.pt"):
        (tmp_path / name).write_text("half")
    with one_writer.writing(str(tmp_path)):
        left = sorted(set(os.listdir(tmp_path)) - {"experts", lease.NAME})
        assert len(left) == (2 if after_a_kill else 3)
        assert {"a.pt", "of_another.tmp"} <= set(left)
        assert len(os.listdir(tmp_path / "experts")) == (0 if after_a_kill else 1)


def test_nothing_is_saved_over_another_training(tmp_path):
    saved, cfg = [], SimpleNamespace(no_save=False, no_save_optimizer_state=True)
    save = wrapped.save_checkpoint(lambda *_: saved.append(1))
    task = SimpleNamespace(args=None)
    trainer = SimpleNamespace(optimizer=None, get_model=torch.nn.Module, task=task)
    with one_writer.writing(str(tmp_path)):
        save(cfg, trainer, None, None)
        leave(str(tmp_path), ELSEWHERE)
        with pytest.raises(ValueError, match="which process 12 on node7 has taken over"):
            save(cfg, trainer, None, None)
    assert saved == [1]
