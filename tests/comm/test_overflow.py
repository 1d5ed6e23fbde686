"""An overflow in one rank's experts: every rank skips the step and lowers the loss scale alike.

Covered: fairseq's FP16Optimizer around moe_adam, torch's GradScaler after `spread_overflow`; an
infinity, a NaN, none.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairseq_tutel import make_topology
from fairseq_tutel.comm.gradients import mark_expert, spread_overflow


def _parameters(poison: float) -> tuple[nn.Parameter, nn.Parameter]:
    """Return a dense parameter and an expert, whose gradient is bad on rank 1 alone."""
    dense, expert = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1, 2, 2))
    mark_expert(expert)
    dense.grad, expert.grad = torch.ones(3), torch.ones(1, 2, 2)
    if dist.get_rank() == 1:
        expert.grad[0, 1, 1] = poison
    return dense, expert


def fp16(poison: float) -> tuple[bool, float]:
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.optim.adam import FairseqAdamConfig
    from fairseq.optim.fp16_optimizer import FP16Optimizer
    from omegaconf import OmegaConf

    from fairseq_tutel import plugin

    plugin.register()
    make_topology([2], 2)
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = OmegaConf.structured(FairseqAdamConfig)
    cfg.optimizer._name = "moe_adam"
    cfg.optimization.lr = [0.1]
    cfg.common.fp16_no_flatten_grads = True
    params = _parameters(poison)
    optimizer = FP16Optimizer.build_optimizer(cfg, list(params))
    optimizer.zero_grad()
    for p, fresh in zip(params, _parameters(poison), strict=True):
        p.grad = fresh.grad
    optimizer._needs_sync = True
    skipped = False
    try:
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    except OverflowError:
        skipped = True
    return skipped, optimizer.scaler.loss_scale


def amp(poison: float) -> tuple[bool, float]:
    params = _parameters(poison)
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.zeros(()))  # the scaler makes its state when it is first used
    spread_overflow(params, make_topology([2], 2))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return bool((params[0] == 1).all()), scaler.get_scale()


@pytest.mark.parametrize("mode", [fp16, amp])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_every_rank_skips_the_step_of_one_rank_s_overflow(ranks, mode, poison):
    first, second = ranks(2).run(mode, poison)
    assert first == second
    skipped, scale = first
    assert skipped
    assert scale == (8.0 if mode is amp else 64.0)


@pytest.mark.parametrize("mode", [fp16, amp])
def test_finite_gradients_take_the_step(ranks, mode):
    assert ranks(2).run(mode, 2.0) == [(False, 16.0 if mode is amp else 128.0)] * 2
