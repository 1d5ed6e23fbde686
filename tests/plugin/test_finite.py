"""Weights and optimizer states with NaN or infinity are neither saved nor loaded."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim import FairseqOptimizer

from fairseq_tutel import plugin
from fairseq_tutel.plugin.training import finite, save
from fairseq_tutel.plugin.training.finite import mismatch

plugin.register()


class Optimizer(FairseqOptimizer):
    def __init__(self, params):
        super().__init__(None)
        self._optimizer = torch.optim.Adam(params)


def trainer_in(folder, updates=7, masters=False):
    model = torch.nn.Linear(2, 3)
    model.register_buffer("mask", torch.tensor([-torch.inf]))
    model.frozen = torch.nn.Parameter(torch.tensor([-torch.inf]), requires_grad=False)
    trained = [model.weight, model.bias]
    own = [torch.nn.Parameter(p.detach().clone()) for p in trained] if masters else trained
    inner = Optimizer(own)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    inner.optimizer.step()
    outer = SimpleNamespace(fp32_optimizer=inner, fp16_params=trained) if masters else inner
    return SimpleNamespace(
        cfg=SimpleNamespace(checkpoint=SimpleNamespace(save_dir=str(folder))),
        get_model=lambda: model, get_criterion=lambda: torch.nn.Module(), optimizer=outer, own=own,
        get_num_updates=lambda: updates, cumulative_training_time=lambda: 3600.0,
    )  # fmt: skip


def saves(trainer):
    """Save a checkpoint; return a list with one entry for each call of fairseq's `save_checkpoint`."""
    called = []
    function = save.save_checkpoint(lambda *_: called.append(1))
    no_save = SimpleNamespace(no_save=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "_completed", lambda *_: contextlib.nullcontext())
        patch.setattr(save, "_states_in_shards", lambda *_: None)
        function(no_save, trainer, None, None)
    return called


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e30])
def test_a_checkpoint_with_a_nan_or_infinite_or_huge_weight_is_not_saved(tmp_path, value):
    trainer = trainer_in(tmp_path)
    assert saves(trainer) == [1]
    with torch.no_grad():
        trainer.get_model().weight[1, 1] = value
    with pytest.raises(ValueError, match=r"after update 7, weight is NaN"):
        saves(trainer)


@pytest.mark.parametrize("masters", [False, True])
def test_a_checkpoint_with_an_infinite_optimizer_state_is_not_saved(tmp_path, masters):
    trainer = trainer_in(tmp_path, masters=masters)
    inner = getattr(trainer.optimizer, "fp32_optimizer", trainer.optimizer).optimizer
    inner.state[trainer.own[1]]["exp_avg_sq"][0] = torch.inf
    with pytest.raises(ValueError, match=r"the optimizer's exp_avg_sq of (the fp32 .*)?bias"):
        saves(trainer)


def test_a_large_but_finite_adam_moment_is_saved(tmp_path):
    trainer = trainer_in(tmp_path)
    trainer.optimizer.optimizer.state[trainer.own[0]]["exp_avg_sq"].fill_(1e30)
    assert saves(trainer) == [1]


def check(trainer, tmp_path):
    checkpoint = SimpleNamespace(
        save_dir=str(tmp_path), restore_file="checkpoint_last.pt", checkpoint_suffix=""
    )
    finite.refuse_loaded(SimpleNamespace(checkpoint=checkpoint), trainer)


def test_a_loaded_checkpoint_with_an_infinite_optimizer_state_is_refused(tmp_path):
    trainer = trainer_in(tmp_path)
    torch.save({}, tmp_path / "checkpoint_last.pt")
    check(trainer, tmp_path)
    trainer.optimizer.optimizer.state[trainer.own[0]]["exp_avg_sq"][0] = torch.inf
    with pytest.raises(ValueError, match=r"checkpoint_last.pt, but .*exp_avg_sq of weight .*--reset"):
        check(trainer, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exp_avg_sq", torch.zeros(80, 512)),
        ("exp_avg", "x"),
        ("exp_avg", torch.zeros(3, 2, dtype=torch.int64)),
    ],
)
def test_a_loaded_adam_moment_with_another_shape_or_type_is_refused(tmp_path, key, value):
    trainer = trainer_in(tmp_path)
    assert mismatch(trainer) is None
    (tmp_path / "checkpoint_last.pt").touch()
    trainer.optimizer.optimizer.state[trainer.own[0]][key] = value
    with pytest.raises(ValueError, match=f"the optimizer's {key} of a parameter .* does not fit"):
        check(trainer, tmp_path)
