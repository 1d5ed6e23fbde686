"""A state that is saved, or trained on from, is finite; a run that reached its limit changes nothing."""

import contextlib
import logging
import math
import os
from pathlib import Path
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


def state_of(trainer, updates):
    state = trainer.own[0], trainer.optimizer.optimizer.state_dict()
    return {
        "model": trainer.get_model().state_dict(),
        "last_optimizer_state": state[1],
        "optimizer_history": [{"num_updates": updates}],
    }


def saves(trainer):
    """What of a save comes to stock's function."""
    called = []
    function = save.save_checkpoint(lambda *_: called.append(1))
    no_save = SimpleNamespace(no_save=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "_completed", lambda *_: contextlib.nullcontext())
        function(no_save, trainer, None, None)
    return called


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_a_ruined_weight_is_not_saved_and_the_checkpoint_before_it_is_named(tmp_path, value):
    trainer = trainer_in(tmp_path)
    assert saves(trainer) == [1]
    good = tmp_path / "checkpoint_1_6.pt"
    torch.save(state_of(trainer, 6), good)
    with torch.no_grad():
        trainer.get_model().weight[1, 1] = value
    torch.save(state_of(trainer, 7), tmp_path / "checkpoint_last.pt")
    with pytest.raises(ValueError, match=r"after update 7, weight is NaN") as refused:
        saves(trainer)
    assert f"{good} (update 6)" in str(refused.value)
    os.remove(good)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete and finite"):
        saves(trainer)


@pytest.mark.parametrize("masters", [False, True])
def test_a_ruined_optimizer_is_not_saved(tmp_path, masters):
    trainer = trainer_in(tmp_path, masters=masters)
    inner = getattr(trainer.optimizer, "fp32_optimizer", trainer.optimizer).optimizer
    inner.state[trainer.own[1]]["exp_avg_sq"][0] = torch.inf
    with pytest.raises(ValueError, match=r"the optimizer's exp_avg_sq of (the fp32 .*)?bias"):
        saves(trainer)


def test_a_ruined_master_is_not_saved(tmp_path):
    trainer = trainer_in(tmp_path, masters=True)
    trainer.own[0].data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the fp32 master of weight"):
        saves(trainer)


def test_a_large_moment_is_no_ruin(tmp_path):
    trainer = trainer_in(tmp_path)
    trainer.optimizer.optimizer.state[trainer.own[0]]["exp_avg_sq"].fill_(1e30)
    assert saves(trainer) == [1]


def test_the_checkpoint_whose_weights_failed_is_named_with_the_one_before(tmp_path):
    trainer = trainer_in(tmp_path)
    for updates in (6, 7):
        torch.save(state_of(trainer, updates), tmp_path / f"checkpoint_1_{updates}.pt")
    said = finite.way_back_from(str(tmp_path), trainer.get_model(), failed_at=7)
    assert (
        "checkpoint_1_7.pt (update 7), from which training fails the same way; the previous one is" in said
    )
    assert said.endswith("checkpoint_1_6.pt (update 6)")
    Path(tmp_path / "checkpoint_1_6.pt").unlink()
    assert "none is older" in finite.way_back_from(str(tmp_path), trainer.get_model(), 7)


def run(trainer, tmp_path, max_update=0, stop_time_hours=0.0, epochs=1):
    """Begin epochs as fairseq's loop does; return how many were trained."""
    trained = []
    checkpoint = SimpleNamespace(
        save_dir=str(tmp_path), restore_file="checkpoint_last.pt", checkpoint_suffix=""
    )
    limits = SimpleNamespace(max_update=max_update, stop_time_hours=stop_time_hours)
    cfg = SimpleNamespace(checkpoint=checkpoint, optimization=limits)
    begin = finite._checked(lambda *_: trained.append(1) or ([1.0], False))
    results = [begin(cfg, trainer, None, None) for _ in range(epochs)]
    return len(trained), results


@pytest.mark.parametrize(
    ("limit", "flag"),
    [({"max_update": 7}, "--max-update 7"), ({"stop_time_hours": 0.5}, "--stop-time-hours 0.5")],
)
def test_a_training_that_reached_its_limit_trains_no_more(tmp_path, caplog, limit, flag):
    caplog.set_level(logging.INFO)
    assert run(trainer_in(tmp_path), tmp_path, **limit) == (0, [([None], True)])
    assert f"{flag} is already reached" in caplog.text


@pytest.mark.parametrize("limit", [{}, {"max_update": 8}, {"stop_time_hours": 2.0}])
def test_a_training_below_its_limits_goes_on(tmp_path, limit):
    assert run(trainer_in(tmp_path), tmp_path, epochs=2, **limit)[0] == 2


def test_a_ruined_checkpoint_is_not_trained_on(tmp_path):
    trainer = trainer_in(tmp_path)
    torch.save({}, tmp_path / "checkpoint_last.pt")
    assert run(trainer, tmp_path)[0] == 1
    trainer.optimizer.optimizer.state[trainer.own[0]]["exp_avg_sq"][0] = torch.inf
    with pytest.raises(ValueError, match=r"checkpoint_last.pt, in which .*exp_avg_sq of weight .*--reset"):
        run(trainer, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("exp_avg_sq", torch.zeros(80, 512)), ("exp_avg", "x"), ("exp_avg", torch.zeros(2, 2).to_sparse())],
)
def test_a_moment_of_another_form_is_refused(tmp_path, key, value):
    trainer = trainer_in(tmp_path)
    assert mismatch(trainer) is None
    (tmp_path / "checkpoint_last.pt").touch()
    trainer.optimizer.optimizer.state[trainer.own[0]][key] = value
    with pytest.raises(ValueError, match=f"in which the optimizer's {key} of a parameter .* does not fit"):
        run(trainer, tmp_path)


def test_what_older_versions_and_other_flags_leave_is_accepted(tmp_path):
    trainer = trainer_in(tmp_path)
    (group,) = trainer.optimizer.optimizer.param_groups
    group |= {"amsgrad": True, "foreach": True, "unknown": object()}
    for state in trainer.optimizer.optimizer.state.values():
        state |= {"momentum_buffer": None, "max_exp_avg_sq": state["exp_avg_sq"].clone()}
    trainer.optimizer.optimizer.defaults["added by torch"] = False
    assert mismatch(trainer) is None
    del group["amsgrad"]
    assert mismatch(trainer) == "the optimizer's missing amsgrad"


def test_moments_of_no_parameter_are_refused(tmp_path):
    trainer = trainer_in(tmp_path)
    (tmp_path / "checkpoint_last.pt").touch()
    trainer.optimizer.optimizer.state[4] = {"exp_avg": torch.zeros(2)}
    with pytest.raises(ValueError, match="in which the optimizer's state of the unknown parameter 4 does"):
        run(trainer, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eps", "x"),
        ("eps", -1.0),
        ("eps", math.nan),
        ("eps", torch.zeros(3)),
        ("betas", [0.9]),
        ("betas", (1.0, 1.0)),
        ("betas", None),
        ("weight_decay", math.inf),
        ("amsgrad", True),
        ("maximize", True),
    ],
)
def test_an_option_of_the_optimizer_without_meaning_is_refused(tmp_path, key, value):
    trainer = trainer_in(tmp_path)
    (group,) = trainer.optimizer.optimizer.param_groups
    group[key] = value
    (tmp_path / "checkpoint_last.pt").touch()
    with pytest.raises(ValueError, match=f"in which the optimizer's {key} .* does not fit .*give an older"):
        run(trainer, tmp_path)


def test_fairseq_s_loop_is_checked_while_main_runs():
    import fairseq_cli.train as command

    stock = command.train
    with finite.checked_at_start(command.main):
        assert command.train is not stock
    assert command.train is stock
