"""After an overflow in one rank's experts, all ranks skip the step and lower the loss scale equally."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairseq_tutel import make_topology
from fairseq_tutel.parallel.gradients import mark_expert


def _parameters(poison: float) -> tuple[nn.Parameter, nn.Parameter]:
    """Return a dense and an expert parameter; on rank 1, the expert's gradient has the element `poison`."""
    dense, expert = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1, 2, 2))
    mark_expert(expert)
    dense.grad, expert.grad = torch.ones(3), torch.ones(1, 2, 2)
    if dist.get_rank() == 1:
        expert.grad[0, 1, 1] = poison
    return dense, expert


def _config():
    from fairseq.dataclass.configs import FairseqConfig
    from fairseq.optim.adam import FairseqAdamConfig
    from omegaconf import OmegaConf

    from fairseq_tutel import plugin

    plugin.register()
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = OmegaConf.structured(FairseqAdamConfig)
    OmegaConf.update(cfg.optimizer, "_name", "moe_adam", force_add=True)
    cfg.optimization.lr = [0.1]
    return cfg


def _on_shared_experts(step, *arguments):
    """Run an optimizer step on two ranks with expert parallelism."""
    from fairseq_tutel.plugin.run_state import RUN

    with RUN.having(topology=make_topology([2], 2)):
        return step(*arguments)


def fp16(poison: float) -> tuple[bool, float]:
    from fairseq.optim.fp16_optimizer import FP16Optimizer

    cfg = _config()
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


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_all_ranks_skip_a_step_if_gradients_overflow_on_one_rank(ranks, poison):
    assert ranks(2).run(_on_shared_experts, fp16, poison) == [(True, 64.0)] * 2


def test_ranks_do_not_skip_a_step_with_finite_gradients(ranks):
    assert ranks(2).run(fp16, 2.0) == [(False, 128.0)] * 2
