"""An overflow in one rank's experts: every rank skips the step and lowers the loss scale alike."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairseq_tutel import make_topology
from fairseq_tutel.parallel.gradients import mark_expert


def _parameters(poison: float) -> tuple[nn.Parameter, nn.Parameter]:
    """Return a dense parameter and an expert, whose gradient is bad on rank 1 alone."""
    dense, expert = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1, 2, 2))
    mark_expert(expert)
    dense.grad, expert.grad = torch.ones(3), torch.ones(1, 2, 2)
    if dist.get_rank() == 1:
        expert.grad[0, 1, 1] = poison
    return dense, expert


def _config(optimizer: str):
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.optim.adam import FairseqAdamConfig
    from omegaconf import OmegaConf

    from fairseq_tutel import plugin

    plugin.register()
    cfg = OmegaConf.structured(FairseqConfig)
    if optimizer == "moe_sgd":  # of the older generation, without a dataclass
        cfg.optimizer = OmegaConf.create({"lr": [0.1], "momentum": 0.0, "weight_decay": 0.0})
    else:
        cfg.optimizer = OmegaConf.structured(FairseqAdamConfig)
    OmegaConf.update(cfg.optimizer, "_name", optimizer, force_add=True)
    cfg.optimization.lr = [0.1]
    return cfg


def _on_shared_experts(step, *arguments):
    """Run a step in a training run whose two ranks share the experts."""
    from fairseq_tutel.plugin.run_state import RUN

    with RUN.having(topology=make_topology([2], 2)):
        return step(*arguments)


def fp16(poison: float) -> tuple[bool, float]:
    from fairseq.optim.fp16_optimizer import FP16Optimizer

    cfg = _config("moe_adam")
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


def _amp_step(name: str, poison: float) -> tuple[list[float], float]:
    """Take one step of lr 0.1 from weights of 1 on gradients of 1, as fairseq's trainer does."""
    from fairseq.optim.amp_optimizer import AMPOptimizer

    cfg = _config(name)
    cfg.common.amp = True
    dense, expert = params = _parameters(poison)
    optimizer = AMPOptimizer.build_optimizer(cfg, list(params))
    optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer.scaler.scale(torch.zeros(()))  # the scaler makes its state when it is first used
    dense.grad *= 16.0
    expert.grad *= 16.0 * 2  # a sum over two ranks, to be divided by their number
    module = nn.ParameterList(params)
    module.all_reduce_grads = lambda: None  # fairseq's data-parallel wrapper has it
    optimizer.all_reduce_grads(module)
    optimizer.clip_grad_norm(0.0)
    optimizer.step()
    return dense.tolist(), optimizer.scaler.get_scale()


def amp(poison: float) -> tuple[bool, float]:
    weights, scale = _amp_step("moe_adam", poison)
    return weights == [1.0] * 3, scale


@pytest.mark.parametrize("mode", [fp16, amp])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_every_rank_skips_the_step_of_one_rank_s_overflow(ranks, mode, poison):
    first, second = ranks(2).run(_on_shared_experts, mode, poison)
    assert first == second
    skipped, scale = first
    assert skipped
    assert scale == (8.0 if mode is amp else 64.0)


@pytest.mark.parametrize("mode", [fp16, amp])
def test_finite_gradients_take_the_step(ranks, mode):
    assert ranks(2).run(mode, 2.0) == [(False, 16.0 if mode is amp else 128.0)] * 2
