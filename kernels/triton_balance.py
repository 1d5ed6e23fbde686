"""Computes a GShard balance loss and its gradient in one Triton kernel. E is the number of experts."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.tiles import next_power_of_2
from fairseq_tutel.kernels.triton_launch import Plan, accumulator_of, launch


def _fake_load_loss(mass_E: Tensor, load_E: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    return mass_E.new_empty(()), mass_E.new_empty(mass_E.shape)


@opaque(_fake_load_loss)
def load_loss(mass_E: Tensor, load_E: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return a GShard balance loss and the gradient of mass_E, each expert's sum of probabilities."""
    mass_E, load_E = mass_E.contiguous(), load_E.contiguous()
    loss, gradient_E = _fake_load_loss(mass_E, load_E, num_tokens)
    plan = _plan(mass_E.shape[0], mass_E.dtype)
    launch(plan, mass_E.device, mass_E, load_E, num_tokens, loss, gradient_E)
    return loss, gradient_E


@functools.lru_cache(maxsize=1024)
def _plan(num_experts: int, dtype: torch.dtype) -> Plan:
    constants = {"ACC": accumulator_of(dtype), "BLOCK_E": next_power_of_2(num_experts)}
    return Plan(_load_loss_kernel, (1,), (num_experts,), constants)


@triton.jit
def _load_loss_kernel(
    mass_ptr,
    load_ptr,
    tokens_ptr,
    loss_ptr,
    gradient_ptr,
    num_experts,
    ACC: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    experts = tl.arange(0, BLOCK_E)
    inside = experts < num_experts
    load = tl.load(load_ptr + experts, mask=inside, other=0)
    share = load.to(ACC) / tl.maximum(tl.sum(load, axis=0), 1).to(ACC)
    tokens = tl.maximum(tl.load(tokens_ptr), 1).to(ACC)
    mass = tl.load(mass_ptr + experts, mask=inside, other=0.0).to(ACC)
    tl.store(loss_ptr, num_experts * tl.sum(share * mass, axis=0) / tokens)
    tl.store(gradient_ptr + experts, num_experts * share / tokens, mask=inside)
