"""Whether a save of stock's will write a file is known before experts are gathered or written for it.

Covered: all that decides it, against what stock then does; a save of nothing through the wrapper.
"""

import itertools
from types import SimpleNamespace

import pytest
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint import experts
from fairseq_tutel.plugin import wrapped

plugin.register()


class Recorder:
    """A trainer that notes what its save was said to write before it, and what it wrote."""

    should_save_checkpoint_on_current_rank = True
    data_parallel_rank = 0
    checkpoint_suffix = ""
    always_call_state_dict_during_save_checkpoint = False
    optimizer = None
    task = SimpleNamespace(args=None)

    def __init__(self, cfg, updates):
        self.cfg, self.updates, self.expected, self.saved = cfg, updates, None, False

    def get_model(self):
        return None

    def get_num_updates(self):
        return self.updates

    def consolidate_optimizer(self):
        pass

    def save_checkpoint(self, path, extra_state):
        self.saved = True

    def save(self, end_of_epoch, val_loss):
        epoch_itr = SimpleNamespace(
            epoch=3, end_of_epoch=lambda: end_of_epoch, state_dict=lambda: {}
        )
        arguments = (self.cfg, self, epoch_itr, val_loss)
        self.expected = wrapped.will_save(*arguments)
        checkpoint_utils.save_checkpoint(*arguments)


@pytest.mark.parametrize("maximize", [False, True])
def test_what_stock_will_save_is_known_before(tmp_path, monkeypatch, maximize):
    monkeypatch.setattr(checkpoint_utils.PathManager, "copy", lambda *_, **__: True)
    monkeypatch.setattr(experts, "expert_modules", lambda model: [])
    stock, outcomes = vars(CheckpointConfig()), set()
    for no_last, no_epoch, interval, per_updates, keep, end, updates, loss in itertools.product(
        (False, True),
        (False, True),
        (1, 2),
        (0, 5),
        (-1, 2),
        (False, True),
        (10, 11),
        (None, 1.0, 2.0, 3.0, float("nan")),
    ):
        cfg = SimpleNamespace(**stock)
        cfg.save_dir, cfg.maximize_best_checkpoint_metric = str(tmp_path), maximize
        cfg.no_last_checkpoints, cfg.no_epoch_checkpoints = no_last, no_epoch
        cfg.save_interval, cfg.save_interval_updates = interval, per_updates
        cfg.keep_best_checkpoints = keep
        monkeypatch.setattr(checkpoint_utils.save_checkpoint, "best", 2.0, raising=False)
        trainer = Recorder(cfg, updates)
        trainer.save(end, loss)
        # One of several best ones is drawn among them by chance, and asks for the experts anyway.
        if loss is None or keep < 0:
            assert trainer.expected == trainer.saved, (cfg, end, updates, loss)
        assert trainer.expected or not trainer.saved
        outcomes.add(trainer.saved)
    assert outcomes == {False, True}


@pytest.mark.parametrize("no_last", [False, True])
def test_experts_are_written_for_a_checkpoint_alone(tmp_path, monkeypatch, no_last):
    cfg = SimpleNamespace(**vars(CheckpointConfig()))
    cfg.save_dir, cfg.no_last_checkpoints = str(tmp_path), no_last
    cfg.no_save_optimizer_state = True
    written = []
    monkeypatch.setattr(wrapped, "saves_shards", lambda task: True)
    monkeypatch.setattr(wrapped, "write_in_shards", lambda *_: written.append(1))
    monkeypatch.setattr(experts, "expert_modules", lambda model: [model])
    trainer = Recorder(cfg, 10)
    trainer.save(False, None)
    assert trainer.saved == bool(written) == (not no_last)
