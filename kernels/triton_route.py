"""Computes softmax with top-k and its gradient in Triton, in place of `reference_route` on GPUs.

T tokens, E experts, K top_k.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.tiles import cdiv, next_power_of_2
from fairseq_tutel.kernels.triton_launch import Plan, accumulator_of, launch

# The number of elements of a [tokens, experts] tile. With 4096, compiling the fp64 kernel for sm_80 takes
# 25 s. With 1024, each kernel compiles in less than 1 s and needs at most 128 registers. TILE is not tuned.
TILE = 1024


def _fake_softmax_top_k(
    logits_TE: Tensor, top_k: int, normalize: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    ids_TK = logits_TE.new_empty(num_tokens, top_k, dtype=torch.int64)
    probs_TE = logits_TE.new_empty(num_tokens, num_experts)
    return probs_TE, ids_TK, logits_TE.new_empty(num_tokens, top_k)


@opaque(_fake_softmax_top_k)
def softmax_top_k(logits_TE: Tensor, top_k: int, normalize: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax and each token's K largest probabilities: (probs_TE, ids_TK, weights_TK)."""
    logits_TE = logits_TE.contiguous()
    probs_TE, ids_TK, weights_TK = _fake_softmax_top_k(logits_TE, top_k)
    if logits_TE.shape[0]:
        plan = _plan(logits_TE.shape, top_k, normalize, logits_TE.dtype)
        launch(plan, logits_TE.device, logits_TE, probs_TE, ids_TK, weights_TK)
    return probs_TE, ids_TK, weights_TK


def _fake_softmax_top_k_backward(probs_TE: Tensor, *_: Any) -> Tensor:
    return probs_TE.new_empty(probs_TE.shape)


@opaque(_fake_softmax_top_k_backward)
def softmax_top_k_backward(
    probs_TE: Tensor,
    ids_TK: Tensor,
    dprobs_TE: Tensor | None,
    dweights_TK: Tensor | None,
    normalize: bool = False,
) -> Tensor:
    """Return the gradient of the logits in `softmax_top_k`; an output gradient of None means zeros."""
    return gate_backward(probs_TE, ids_TK, dprobs_TE, dweights_TK, normalize, None)[0]


def gate_backward(
    probs_TE: Tensor,
    ids_TK: Tensor,
    dprobs_TE: Tensor | None,
    dweights_TK: Tensor | None,
    normalize: bool,
    weight_ED: Tensor | None,
) -> tuple[Tensor, Any]:
    """Without `weight_ED`, return the logits' gradient and None; else two factors of the tokens' gradient.

    The tokens' gradient is the matrix product of the factors. The factor [T, 2 E] has the logits' gradient,
    rounded to the weight's dtype, and the remainders. The factor [2 E, D] has the weight twice.
    """
    if dprobs_TE is not None and dprobs_TE.stride() not in ((0, 1), (probs_TE.shape[1], 1)):
        dprobs_TE = dprobs_TE.contiguous()  # a balance loss gives one row with stride 0 for all tokens
    num_tokens, num_experts = probs_TE.shape
    twice_FD, size = None, 0
    if weight_ED is None:
        dlogits = probs_TE.new_empty(probs_TE.shape)
    else:
        weight_ED, size = weight_ED.contiguous(), weight_ED.numel()
        dlogits = weight_ED.new_empty(num_tokens, 2 * num_experts)
        twice_FD = weight_ED.new_empty(2 * num_experts, weight_ED.shape[1])
    if num_tokens + size == 0:
        return dlogits, twice_FD
    stride = 0 if dprobs_TE is None else dprobs_TE.stride(0)
    launch(
        _plan(probs_TE.shape, ids_TK.shape[1], normalize, probs_TE.dtype, (size, stride)),
        probs_TE.device,
        probs_TE.contiguous(),
        ids_TK.contiguous(),
        dprobs_TE,
        None if dweights_TK is None else dweights_TK.contiguous(),
        dlogits,
        weight_ED,
        twice_FD,
    )
    return dlogits, twice_FD


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...], top_k: int, normalize: bool, dtype: torch.dtype, backward: tuple[int, ...] = ()
) -> Plan:
    """Return the forward kernel's plan, or with `backward` (weight size, dprobs stride) the backward's."""
    num_tokens, num_experts = shape
    # A tile covers all experts, and has about TILE elements, or half as many in fp64.
    block_e = max(next_power_of_2(num_experts), 16)
    block_t = max(TILE // (2 if dtype == torch.float64 else 1) // block_e, 1)
    constants = {
        "NORMALIZE": normalize,
        "TINY": torch.finfo(dtype).tiny,
        "ACC": accumulator_of(dtype),
        "BLOCK_T": block_t,
        "BLOCK_E": block_e,
    }
    programs, numbers = cdiv(num_tokens, block_t), (num_tokens, num_experts, top_k)
    if not backward:
        constants |= {"BLOCK_K": next_power_of_2(top_k)}
        return Plan(_softmax_top_k_kernel, (programs,), numbers, constants)
    size, stride = backward
    grid, constants = (programs + cdiv(size, TILE),), constants | {"BLOCK": TILE}
    return Plan(_softmax_top_k_backward_kernel, grid, (size, *numbers, stride), constants)


@triton.jit(do_not_specialize=["num_tokens"])
def _softmax_top_k_kernel(
    logits_ptr,
    probs_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    num_experts,
    top_k,
    NORMALIZE: tl.constexpr,
    TINY: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    here = tokens < num_tokens
    inside = here[:, None] & (experts < num_experts)[None, :]
    cells = tokens[:, None] * num_experts + experts[None, :]
    logits = tl.load(logits_ptr + cells, mask=inside, other=-float("inf")).to(ACC)
    exps = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    probs = (exps / tl.sum(exps, axis=1)[:, None]).to(probs_ptr.dtype.element_ty)
    tl.store(probs_ptr + cells, probs, mask=inside)
    # The keys are rounded probabilities, so that equal stored probabilities are ties. NaN becomes the
    # largest key, because a maximum may skip NaN.
    keys = probs.to(ACC)
    keys = tl.where(keys == keys, keys, 2.0)
    keys = tl.where(inside, keys, -1.0)
    choices = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    weights = tl.zeros([BLOCK_T, BLOCK_K], dtype=ACC)
    for j in range(top_k):
        best, ids = tl.max(keys, axis=1, return_indices=True)
        chosen = tl.where(choices[None, :] == j, ids[:, None], chosen)
        weights = tl.where(choices[None, :] == j, best[:, None], weights)
        keys = tl.where(experts[None, :] == ids[:, None], -1.0, keys)
    weights = tl.where(weights > 1.5, float("nan"), weights)
    if NORMALIZE:
        total = _rounded(tl.sum(weights, axis=1), probs_ptr)
        weights = weights / tl.where(total < TINY, TINY, total)[:, None]
    copies = tokens[:, None] * top_k + choices[None, :]
    inside = here[:, None] & (choices < top_k)[None, :]
    tl.store(ids_ptr + copies, chosen, mask=inside)
    tl.store(weights_ptr + copies, weights, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "size"])
def _softmax_top_k_backward_kernel(
    probs_ptr,
    ids_ptr,
    dprobs_ptr,
    dweights_ptr,
    dlogits_ptr,
    gate_ptr,
    twice_ptr,
    size,
    num_tokens,
    num_experts,
    top_k,
    dprobs_stride,
    NORMALIZE: tl.constexpr,
    TINY: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    programs = tl.cdiv(num_tokens, BLOCK_T)
    if gate_ptr is not None:  # noqa: SIM102 (the first condition is evaluated at compile time)
        if tl.program_id(0) >= programs:  # the remaining programs copy the gate's weight twice
            copied = (tl.program_id(0) - programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(gate_ptr + copied, mask=copied < size)
            tl.store(twice_ptr + copied, values, mask=copied < size)
            tl.store(twice_ptr + size + copied, values, mask=copied < size)
            return
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    here = tokens < num_tokens
    inside = here[:, None] & (experts < num_experts)[None, :]
    cells = tokens[:, None] * num_experts + experts[None, :]
    probs = tl.load(probs_ptr + cells, mask=inside, other=0.0).to(ACC)
    grads = tl.zeros([BLOCK_T, BLOCK_E], dtype=ACC)
    if dprobs_ptr is not None:
        rows = dprobs_ptr + tokens[:, None] * dprobs_stride + experts[None, :]
        grads += tl.load(rows, mask=inside, other=0.0).to(ACC)
    if dweights_ptr is not None:
        # The gradient of p in weight = p / total is (dweight - <dweights, p> / total) / total.
        total = tl.full([BLOCK_T], 0 if NORMALIZE else 1, dtype=ACC)
        shift = tl.zeros([BLOCK_T], dtype=ACC)
        if NORMALIZE:
            for j in range(top_k):
                ids, dweights = _load_choice(ids_ptr, dweights_ptr, tokens * top_k + j, here, ACC)
                weights = tl.sum(tl.where(experts[None, :] == ids[:, None], probs, 0.0), axis=1)
                total += weights
                shift += dweights * weights
            total = _rounded(total, probs_ptr)
            shift = tl.where(total < TINY, 0.0, shift / total)
            total = tl.where(total < TINY, TINY, total)
        for j in range(top_k):
            ids, dweights = _load_choice(ids_ptr, dweights_ptr, tokens * top_k + j, here, ACC)
            dweights = (dweights - shift) / total
            grads += tl.where(experts[None, :] == ids[:, None], dweights[:, None], 0.0)
    dots = tl.sum(probs * grads, axis=1)
    dlogits = probs * (grads - dots[:, None])
    if gate_ptr is None:
        tl.store(dlogits_ptr + cells, dlogits, mask=inside)
    else:
        cells += tokens[:, None] * num_experts
        dlogits = dlogits.to(tl.float32)
        high = dlogits.to(dlogits_ptr.dtype.element_ty)
        tl.store(dlogits_ptr + cells, high, mask=inside)
        tl.store(dlogits_ptr + num_experts + cells, dlogits - high.to(tl.float32), mask=inside)


@triton.jit
def _load_choice(ids_ptr, dweights_ptr, copies, here, ACC: tl.constexpr):
    """For one choice of each token, load the expert and the gradient of the weight."""
    ids = tl.load(ids_ptr + copies, mask=here, other=0).to(tl.int32)
    return ids, tl.load(dweights_ptr + copies, mask=here, other=0.0).to(ACC)


@triton.jit
def _rounded(values, like_ptr):
    """Round values to the dtype of a pointer's elements, as torch rounds a sum."""
    return values.to(like_ptr.dtype.element_ty).to(values.dtype)
