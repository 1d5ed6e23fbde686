"""Computes sums over tokens, and from these sums a GShard balance loss with its gradient, in Triton.

T tokens, E experts, K top_k, P programs.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.tiles import cdiv, next_power_of_2
from fairseq_tutel.kernels.triton_launch import Plan, accumulator_of, launch

# Elements of a [tokens, experts] tile, and the most programs whose sums are added. Not tuned for speed.
TILE, PROGRAMS = 1024, 128


def _fake_token_sums(probs_TE: Tensor, weights_TK: Tensor, real_T: Tensor | None) -> Tensor:
    wide = torch.promote_types(probs_TE.dtype, torch.float32)
    return probs_TE.new_empty(probs_TE.shape[1] + 1 + weights_TK.shape[1], dtype=wide)


@opaque(_fake_token_sums)
def token_sums(probs_TE: Tensor, weights_TK: Tensor, real_T: Tensor | None) -> Tensor:
    """Return sums over tokens: each expert's probabilities, the entropy, and each choice's weights."""
    wide = torch.promote_types(probs_TE.dtype, torch.float32)
    plan = _sums_plan(probs_TE.shape, weights_TK.shape[1], wide)
    width = probs_TE.shape[1] + 1 + weights_TK.shape[1]
    sums_PX = probs_TE.new_empty(plan.grid[0], width, dtype=wide)
    real = None if real_T is None else real_T.contiguous().view(torch.uint8)
    tensors = probs_TE.contiguous(), weights_TK.contiguous(), real, sums_PX
    launch(plan, probs_TE.device, *tensors)
    return sums_PX.sum(0)


@functools.lru_cache(maxsize=1024)
def _sums_plan(shape: tuple[int, ...], top_k: int, dtype: torch.dtype) -> Plan:
    num_tokens, num_experts = shape
    block_e = next_power_of_2(num_experts)
    block_t, block_k = max(TILE // block_e, 1), next_power_of_2(top_k)
    constants = {
        "TINY": torch.finfo(dtype).tiny,
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
        "BLOCK_K": block_k,
    }
    programs = min(max(cdiv(num_tokens, block_t), 1), PROGRAMS)
    return Plan(_token_sums_kernel, (programs,), (num_tokens, num_experts, top_k), constants)


@triton.jit(do_not_specialize=["num_tokens"])
def _token_sums_kernel(
    probs_ptr,
    weights_ptr,
    real_ptr,
    sums_ptr,
    num_tokens,
    num_experts,
    top_k,
    TINY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    acc = sums_ptr.dtype.element_ty
    experts, choices = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    probs = tl.zeros([BLOCK_E], dtype=acc)
    entropy = tl.zeros([BLOCK_E], dtype=acc)
    weights = tl.zeros([BLOCK_K], dtype=acc)
    # Each program always reads the same tokens, so that sums have the same order in every run.
    for first in range(tl.program_id(0) * BLOCK_T, num_tokens, tl.num_programs(0) * BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T).to(tl.int64)
        real = tokens < num_tokens
        if real_ptr is not None:
            real = real & (tl.load(real_ptr + tokens, mask=real, other=0) != 0)
        inside = real[:, None] & (experts < num_experts)[None, :]
        cells = probs_ptr + tokens[:, None] * num_experts + experts[None, :]
        values = tl.load(cells, mask=inside, other=0.0).to(acc)
        probs += tl.sum(values, axis=0)
        entropy -= tl.sum(values * tl.log(tl.maximum(values, TINY)), axis=0)
        inside = real[:, None] & (choices < top_k)[None, :]
        cells = weights_ptr + tokens[:, None] * top_k + choices[None, :]
        weights += tl.sum(tl.load(cells, mask=inside, other=0.0).to(acc), axis=0)
    row = sums_ptr + tl.program_id(0) * (num_experts + 1 + top_k)
    tl.store(row + experts, probs, mask=experts < num_experts)
    tl.store(row + num_experts, tl.sum(entropy, axis=0))
    tl.store(row + num_experts + 1 + choices, weights, mask=choices < top_k)


def _fake_load_loss(mass_E: Tensor, load_E: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    return mass_E.new_empty(()), mass_E.new_empty(mass_E.shape)


@opaque(_fake_load_loss)
def load_loss(mass_E: Tensor, load_E: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return a GShard balance loss, and its gradient for mass_E (each expert's sum of probabilities)."""
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
