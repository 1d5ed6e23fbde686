"""moe_adam computes the updates of fairseq's Adam, with fp32 moments and with fp16 moments."""

import copy

import pytest
import torch
from fairseq.optim.adam import Adam

from fairseq_tutel.parallel.gradients import mark_expert, mark_root_scaled
from fairseq_tutel.parallel.groups import Slice, Topology, mark_slice
from fairseq_tutel.plugin.optim.moe_adam import FusedAdam
from fairseq_tutel.plugin.optim.moe_optimizer import MoEOptimizerMixin, own_part
from fairseq_tutel.plugin.run_state import RUN

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-3, "weight_decay": 0.1}


def _parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (3, 5), (2, 4, 3)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def _step(optimizer, parameters, number):
    generator = torch.Generator().manual_seed(number)
    for i, p in enumerate(parameters):
        # In odd steps, the last parameter has no gradient, so the optimizer skips this parameter.
        skipped = i == 2 and number % 2
        p.grad = None if skipped else torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def test_twenty_updates_of_moe_adam_equal_those_of_fairseq_s_adam():
    ours, stock = _parameters(), _parameters()
    fused, reference = FusedAdam(ours, **SETTINGS), Adam(stock, **SETTINGS)
    for number in range(20):
        _step(fused, ours, number)
        _step(reference, stock, number)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(fused.state[a][key], reference.state[b][key])
        assert fused.state[a]["step"] == reference.state[b]["step"]


def _plain(kind):
    return lambda parameters: kind(parameters, **SETTINGS)


def _resumed(first, second):
    """Take four steps with one optimizer, load its state into another, and take four more steps; return the
    parameters and the second optimizer."""
    parameters = _parameters()
    a = first(parameters)
    for number in range(4):
        _step(a, parameters, number)
    b = second(parameters)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for number in range(4, 8):
        _step(b, parameters, number)
    return parameters, b


def _uninterrupted(make):
    """Return the parameters after eight steps with one optimizer."""
    parameters = _parameters()
    optimizer = make(parameters)
    for number in range(8):
        _step(optimizer, parameters, number)
    return parameters


@pytest.mark.parametrize("first", [Adam, FusedAdam])
def test_moe_adam_loads_the_state_of_fairseq_s_adam_and_vice_versa(first):
    second = FusedAdam if first is Adam else Adam
    through, _ = _resumed(_plain(first), _plain(second))
    for x, y in zip(through, _uninterrupted(_plain(first)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def _with_fp16_stats(parameters):
    optimizer = FusedAdam(parameters, **SETTINGS)
    optimizer.fp16_stats = True
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_with_fp16_moments_are_close_to_updates_with_fp32_moments(dtype):
    ours, stock = _parameters(dtype), _parameters(dtype)
    half, reference = _with_fp16_stats(ours), Adam(stock, **SETTINGS)
    for number in range(20):
        _step(half, ours, number)
        _step(reference, stock, number)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
        assert half.state[a]["exp_avg"].dtype == torch.float16
        # A scale factor maps the largest moment to almost the largest fp16 number.
        assert half.state[a]["exp_avg_sq"].max() > 6e4


def test_the_fp16_moments_of_an_expert_do_not_depend_on_other_experts():
    whole, part = _parameters()[2:], [torch.nn.Parameter(_parameters()[2][1:].clone())]
    mark_expert(whole[0])
    mark_expert(part[0])
    a, b = _with_fp16_stats(whole), _with_fp16_stats(part)
    for _ in range(3):
        whole[0].grad = torch.randn(2, 4, 3) * torch.tensor([100.0, 1.0]).view(2, 1, 1)
        part[0].grad = whole[0].grad[1:].clone()
        a.step()
        b.step()
    # The last bits may differ, because the CPU kernel computes the last elements of a tensor differently.
    torch.testing.assert_close(whole[0][1:], part[0])
    for key in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"):
        torch.testing.assert_close(a.state[whole[0]][key][1:], b.state[part[0]][key])


@pytest.mark.parametrize("fp16_first", [True, False])
def test_moe_adam_loads_moments_of_another_precision(fp16_first):
    make = [_with_fp16_stats, _plain(FusedAdam)]
    through, b = _resumed(*(make if fp16_first else make[::-1]))
    for x, y in zip(through, _uninterrupted(_plain(FusedAdam)), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-3)
        assert b.state[x]["exp_avg"].dtype == (torch.float32 if fp16_first else torch.float16)


def _mixed_into(*stock):
    """Return an optimizer with MoEOptimizerMixin as first base class, without calling __init__."""
    twin = type("Twin", (MoEOptimizerMixin, *stock), {})
    return twin.__new__(twin)


def test_the_state_of_a_composite_optimizer_is_saved_and_loaded_unchanged():
    class Composite:
        """An optimizer with one state per group of parameters, like fairseq's composite optimizer."""

        params = ()

        def state_dict(self):
            return {"encoder": {"state": {}}, "decoder": {"state": {}}}

        def load_state_dict(self, state_dict, optimizer_overrides=None):
            self.loaded = state_dict

    twin = _mixed_into(Composite)
    twin.holds_masters = True
    twin.load_state_dict(twin.state_dict())
    assert twin.loaded == Composite().state_dict()


def test_every_shard_of_an_expert_gets_the_scale_of_the_whole_expert():
    place = Topology(world_size=4, rank=3, expert_parallel_size=4)
    parameter = torch.nn.Parameter(torch.zeros(1, 3, 5))  # the second half of the second expert
    mark_slice(parameter, Slice(2, 1))
    whole = {"exp_avg": torch.randn(2, 6, 5), "exp_avg_scale": torch.randn(2, 1, 1), "step": 7}
    own = own_part(whole, parameter, place)
    assert torch.equal(own["exp_avg"], whole["exp_avg"][1:, 3:])
    assert torch.equal(own["exp_avg_scale"], whole["exp_avg_scale"][1:])
    assert own["step"] == 7


def test_all_reduce_scales_large_fp16_gradients_without_overflow(monkeypatch):
    class Stock:
        def all_reduce_grads(self, module):
            """Do nothing, because the model has only experts."""

    place = Topology(world_size=64, expert_parallel_size=64)
    monkeypatch.setattr(RUN, "topology", place)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    mark_expert(parameter)
    mark_root_scaled(parameter)
    parameter.grad = torch.tensor([60000.0], dtype=torch.float16)
    _mixed_into(Stock).all_reduce_grads(torch.nn.ParameterList([parameter]))
    assert parameter.grad.item() == 7500  # 60000 / 8, because gradients are divided by sqrt(64 ranks)


def test_an_optimizer_step_frees_the_state_gathered_for_a_checkpoint():
    class Stock:
        params = ()

        def step(self):
            """A step that changes no parameter."""

        def state_dict(self):
            return {"state": {}}

    twin = _mixed_into(Stock)
    twin.save_state({0: {"exp_avg": torch.ones(2)}}, Topology())
    assert 0 in twin.state_dict()["state"]
    twin.step()
    assert twin.state_dict()["state"] == {}
