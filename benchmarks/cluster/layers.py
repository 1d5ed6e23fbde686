"""The layer that is measured, with experts that compute, or sleep as if every rank had a device."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import fairseq_tutel as ft
from benchmarks.cluster.settings import Settings
from benchmarks.cluster.timing import Step
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.expert_stack import Tensors
from fairseq_tutel.moe.experts import Experts

# What computes: the ranks' experts, on the cores that they share; or nobody, for as long as a device of
# each rank's own would take.
FORMS = ("compute", "sleep")
# A backward's products, for the input and for the weights, are two of the forward's size.
BACKWARD = 2


class SleepingExperts(Experts):
    """Experts that return their rows after a time proportional to rows and hidden dimension."""

    ms_per_row = 0.0

    @property
    def is_one_node(self) -> bool:
        """Never: they sleep."""
        return False

    def run(self, rows_RD: Tensor, groups: Groups, tensors: Tensors) -> Tensor:
        """Sleep, forward and again in backward; every weight gets a gradient of zeros."""
        share = tensors["fc1_weight"].shape[1] / self.config.hidden_dim
        seconds = 1e-3 * self.ms_per_row * share * sum(groups.host)
        return _Sleep.apply(seconds, rows_RD, *tensors.values())


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seconds: float, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(*weights)
        time.sleep(seconds)
        return rows.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(BACKWARD * ctx.seconds)
        return None, drows, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


def make_layer(settings: Settings, num_experts: int, form: str) -> ft.MoELayer:
    """Return a layer of `num_experts` over all ranks. Collective.

    Args:
        settings: of the run.
        num_experts: E; fewer than ranks are cut into slices.
        form: one of FORMS.
    """
    topology = ft.make_topology([num_experts], settings.world_size, settings.local)
    config = ft.MoEConfig(settings.model_dim, settings.hidden_dim, num_experts, top_k=1)
    experts = None
    if form == "sleep":
        experts = SleepingExperts(config, topology.part(num_experts))
        experts.ms_per_row = settings.expert_ms_per_row
    return ft.MoELayer(config, topology, seed=1, experts=experts)


def step_of(layer: ft.MoELayer, x_TD: Tensor) -> Step:
    """Return a step: forward and backward of the layer."""
    return _forward_and_backward(layer, x_TD, lambda x: layer(x)[0])


def experts_alone(layer: ft.MoELayer, rows_RD: Tensor) -> Step:
    """Return forward and backward of this rank's expert alone, on local rows."""
    return _forward_and_backward(
        layer, rows_RD, lambda r: layer.experts(r, Groups.of_host([len(r)], r.device))
    )


def _forward_and_backward(layer: ft.MoELayer, x: Tensor, forward: Callable[[Tensor], Tensor]) -> Step:
    x = x.detach().requires_grad_()
    dy = torch.ones_like(x)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        forward(x).backward(dy)

    return step


def rows_of(settings: Settings, tokens: int, rank: int) -> Tensor:
    """Return this rank's tokens [T, D]."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(tokens, settings.model_dim, generator=generator)


def rows_arriving(layer: ft.MoELayer, step: Step) -> int:
    """Return how many rows this rank's experts get in a step."""
    seen: list[int] = []
    hook = layer.experts.register_forward_pre_hook(
        lambda module, arguments: seen.append(sum(arguments[1].host))
    )
    step()
    hook.remove()
    return sum(seen)
