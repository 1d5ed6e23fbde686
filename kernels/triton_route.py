"""Triton kernels of routing: softmax with top-k, and slots; they replace `reference_route` on GPUs.

Slots are computed by a block scan in three steps: a histogram of every block of assignments, an exclusive
sum over the blocks, and comparisons of the ids within a block. The scan needs no atomics, sort, [T, E]
tensor or host read. T tokens, E experts, K top_k, N = K * T assignments, where j * T + t is choice j of
token t.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.triton_launch import accumulator_of

# Elements of a [tokens, experts] tile. With 4096 the fp64 kernel takes 25 s to compile for sm_80. With 1024
# every kernel compiles in less than 1 s and needs at most 96 registers. Not tuned for speed on a GPU.
TILE = 1024
# Assignments per block. A slot costs BLOCK_N comparisons, and the scan takes N / BLOCK_N steps. PEERS
# assignments are compared at a time, because comparing all at once spills scalar registers on gfx942. Not
# tuned for speed.
BLOCK_N, PEERS = 128, 32
COUNT_BLOCK_E = 32
# Tile of the scan over blocks. It covers few experts per program, because only programs run in parallel.
SCAN_BLOCK_B, SCAN_BLOCK_E = 256, 8


def _fake_softmax_top_k(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    shape = (logits_TE.shape[0], top_k)
    ids_TK = logits_TE.new_empty(shape, dtype=torch.int64)
    return logits_TE.new_empty(logits_TE.shape), ids_TK, logits_TE.new_empty(shape)


@opaque(_fake_softmax_top_k)
def softmax_top_k(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax and each token's K largest probabilities: (probs_TE, ids_TK, weights_TK)."""
    logits_TE = logits_TE.contiguous()
    probs_TE, ids_TK, weights_TK = _fake_softmax_top_k(logits_TE, top_k)
    num_tokens, num_experts = logits_TE.shape
    if num_tokens == 0:
        return probs_TE, ids_TK, weights_TK
    block_t, block_e = _tile(num_experts, logits_TE.dtype == torch.float64)
    with torch.cuda.device_of(logits_TE):
        _softmax_top_k_kernel[(triton.cdiv(num_tokens, block_t),)](
            logits_TE,
            probs_TE,
            ids_TK,
            weights_TK,
            num_tokens,
            num_experts,
            top_k,
            ACC=accumulator_of(logits_TE.dtype),
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
    return probs_TE, ids_TK, weights_TK


def _fake_softmax_top_k_backward(
    probs_TE: Tensor, ids_TK: Tensor, dprobs_TE: Tensor | None, dweights_TK: Tensor | None
) -> Tensor:
    return probs_TE.new_empty(probs_TE.shape)


@opaque(_fake_softmax_top_k_backward)
def softmax_top_k_backward(
    probs_TE: Tensor, ids_TK: Tensor, dprobs_TE: Tensor | None, dweights_TK: Tensor | None
) -> Tensor:
    """Return the gradient of the logits in `softmax_top_k`; an output gradient of None means zeros."""
    probs_TE, ids_TK = probs_TE.contiguous(), ids_TK.contiguous()
    dprobs_TE = None if dprobs_TE is None else dprobs_TE.contiguous()
    dweights_TK = None if dweights_TK is None else dweights_TK.contiguous()
    dlogits_TE = torch.empty_like(probs_TE)
    num_tokens, num_experts = probs_TE.shape
    if num_tokens == 0:
        return dlogits_TE
    block_t, block_e = _tile(num_experts, probs_TE.dtype == torch.float64)
    with torch.cuda.device_of(probs_TE):
        _softmax_top_k_backward_kernel[(triton.cdiv(num_tokens, block_t),)](
            probs_TE,
            ids_TK,
            probs_TE if dprobs_TE is None else dprobs_TE,
            probs_TE if dweights_TK is None else dweights_TK,
            dlogits_TE,
            num_tokens,
            num_experts,
            ids_TK.shape[1],
            HAS_DPROBS=dprobs_TE is not None,
            HAS_DWEIGHTS=dweights_TK is not None,
            ACC=accumulator_of(probs_TE.dtype),
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
    return dlogits_TE


def assign_slots(
    ids_KT: Tensor, num_experts: int, time_first: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Number the assignments of each expert: first choices before second choices, then by token order."""
    time, batch = time_first or (1, ids_KT.shape[1])
    return place_assignments(ids_KT, None, num_experts, time, batch)


def assign_slots_by(order_N: Tensor, ids_KT: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Number each expert's assignments in a given order, and return results as `assign_slots` does."""
    return place_assignments(ids_KT, order_N, num_experts, 1, ids_KT.shape[1])


def _fake_place_assignments(
    ids_KT: Tensor, order_N: Tensor | None, num_experts: int, time: int, batch: int
) -> tuple[Tensor, Tensor]:
    top_k, num_tokens = ids_KT.shape
    return ids_KT.new_empty(num_tokens, top_k), ids_KT.new_empty(top_k, num_experts)


@opaque(_fake_place_assignments)
def place_assignments(
    ids_KT: Tensor, order_N: Tensor | None, num_experts: int, time: int, batch: int
) -> tuple[Tensor, Tensor]:
    """Number each expert's assignments with Triton kernels and return (slots_TK, assigned_KE).

    Args:
        ids_KT: [K, T] int64, the expert of each assignment; E for no expert.
        order_N: [K * T] int64, the assignments in the order in which they take slots. None: first choices
            before second choices, then tokens by (sentence, time).
        num_experts: E.
        time: the time steps of a time-first layout, where token t is (t // batch, t % batch); else 1.
        batch: T / time.
    """
    ids_KT = ids_KT.contiguous()
    slots_TK, assigned_KE = _fake_place_assignments(ids_KT, order_N, num_experts, time, batch)
    if ids_KT.numel() == 0:
        return slots_TK, assigned_KE.zero_()
    top_k, num_tokens = ids_KT.shape
    with torch.cuda.device_of(ids_KT):
        starts_BE = _block_starts(ids_KT, None, assigned_KE, time, batch)
        if order_N is not None:
            order_N, ids_1N = order_N.contiguous(), ids_KT.view(1, -1)
            # An order may mix choices, so its blocks do not give the counts per choice.
            del starts_BE  # frees the memory for the next tensor, which has the same size
            starts_BE = _block_starts(ids_1N, order_N, torch.empty_like(assigned_KE[:1]), 1, 1)
        chains, length = (top_k, num_tokens) if order_N is None else (1, top_k * num_tokens)
        num_blocks = triton.cdiv(length, BLOCK_N)
        _place_kernel[(chains * num_blocks,)](
            ids_KT,
            ids_KT if order_N is None else order_N,
            starts_BE,
            slots_TK,
            num_blocks,
            length,
            num_tokens,
            top_k,
            num_experts,
            time,
            batch,
            HAS_ORDER=order_N is not None,
            BLOCK=BLOCK_N,
            PEERS=PEERS,
        )
    return slots_TK, assigned_KE


def _block_starts(
    ids_CL: Tensor, order_L: Tensor | None, totals_CE: Tensor, time: int, batch: int
) -> Tensor:
    """Return each expert's number of assignments before each block, and write totals to `totals_CE`.

    The blocks split C chains of L positions each. The result is [C * blocks, E] int32, chain by chain.
    """
    (chains, length), num_experts = ids_CL.shape, totals_CE.shape[1]
    num_blocks = triton.cdiv(length, BLOCK_N)
    starts_BE = ids_CL.new_empty(chains * num_blocks, num_experts, dtype=torch.int32)
    _count_kernel[(chains * num_blocks, triton.cdiv(num_experts, COUNT_BLOCK_E))](
        ids_CL,
        ids_CL if order_L is None else order_L,
        starts_BE,
        num_blocks,
        length,
        num_experts,
        time,
        batch,
        HAS_ORDER=order_L is not None,
        BLOCK=BLOCK_N,
        BLOCK_E=COUNT_BLOCK_E,
    )
    _scan_kernel[(triton.cdiv(num_experts, SCAN_BLOCK_E),)](
        starts_BE, totals_CE, chains, num_blocks, num_experts, BLOCK_B=SCAN_BLOCK_B, BLOCK_E=SCAN_BLOCK_E
    )
    return starts_BE


def _tile(num_experts: int, is_wide: bool) -> tuple[int, int]:
    """Return the tile size (tokens, experts). A tile covers all experts; fp64 tiles have half the size."""
    block_e = max(triton.next_power_of_2(num_experts), 16)
    return max(TILE // (2 if is_wide else 1) // block_e, 1), block_e


@triton.jit(do_not_specialize=["num_tokens"])
def _softmax_top_k_kernel(
    logits_ptr,
    probs_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    num_experts,
    top_k,
    ACC: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
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
    # The rounded probabilities are compared, so that equal stored values are ties. NaN is replaced by the
    # largest key, because a maximum may skip NaN.
    keys = probs.to(ACC)
    keys = tl.where(keys == keys, keys, 2.0)
    keys = tl.where(inside, keys, -1.0)
    for j in range(top_k):
        best, ids = tl.max(keys, axis=1, return_indices=True)
        copies = tokens * top_k + j
        tl.store(ids_ptr + copies, ids, mask=here)
        tl.store(weights_ptr + copies, tl.where(best > 1.5, float("nan"), best), mask=here)
        keys = tl.where(experts[None, :] == ids[:, None], -1.0, keys)


@triton.jit(do_not_specialize=["num_tokens"])
def _softmax_top_k_backward_kernel(
    probs_ptr,
    ids_ptr,
    dprobs_ptr,
    dweights_ptr,
    dlogits_ptr,
    num_tokens,
    num_experts,
    top_k,
    HAS_DPROBS: tl.constexpr,
    HAS_DWEIGHTS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    here = tokens < num_tokens
    inside = here[:, None] & (experts < num_experts)[None, :]
    cells = tokens[:, None] * num_experts + experts[None, :]
    probs = tl.load(probs_ptr + cells, mask=inside, other=0.0).to(ACC)
    grads = tl.zeros([BLOCK_T, BLOCK_E], dtype=ACC)
    if HAS_DPROBS:
        grads += tl.load(dprobs_ptr + cells, mask=inside, other=0.0).to(ACC)
    if HAS_DWEIGHTS:
        for j in range(top_k):
            copies = tokens * top_k + j
            ids = tl.load(ids_ptr + copies, mask=here, other=0).to(tl.int32)
            dweights = tl.load(dweights_ptr + copies, mask=here, other=0.0).to(ACC)
            grads += tl.where(experts[None, :] == ids[:, None], dweights[:, None], 0.0)
    dots = tl.sum(probs * grads, axis=1)
    tl.store(dlogits_ptr + cells, probs * (grads - dots[:, None]), mask=inside)


@triton.jit
def _copies_at(
    ids_ptr, order_ptr, chain, positions, length, num_experts, time, batch, HAS_ORDER: tl.constexpr
):
    """Load the assignments at these positions and their experts; positions after the end give E."""
    inside = positions < length
    if HAS_ORDER:
        copies = tl.load(order_ptr + positions, mask=inside, other=0)
    else:
        copies = chain.to(tl.int64) * length + positions % time * batch + positions // time
    # Comparisons in 32 bits need half as many instructions.
    return copies, tl.load(ids_ptr + copies, mask=inside, other=num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_blocks", "length", "time", "batch"])
def _count_kernel(
    ids_ptr,
    order_ptr,
    counts_ptr,
    num_blocks,
    length,
    num_experts,
    time,
    batch,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    chain, first = block // num_blocks, block % num_blocks * BLOCK
    positions = first + tl.arange(0, BLOCK)
    _, ids = _copies_at(ids_ptr, order_ptr, chain, positions, length, num_experts, time, batch, HAS_ORDER)
    experts = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    counts = tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), axis=0)
    cells = block.to(tl.int64) * num_experts + experts
    tl.store(counts_ptr + cells, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["chains", "num_blocks"])
def _scan_kernel(
    counts_ptr, totals_ptr, chains, num_blocks, num_experts, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Replace each block's expert counts by the sums of all earlier blocks, and write the totals."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = experts < num_experts
    before = tl.zeros([BLOCK_E], dtype=tl.int32)
    for chain in range(chains):
        before_chain = before
        for first in range(0, num_blocks, BLOCK_B):
            blocks = first + tl.arange(0, BLOCK_B)
            rows = (chain * num_blocks + blocks).to(tl.int64)
            cells = rows[:, None] * num_experts + experts[None, :]
            mask = (blocks < num_blocks)[:, None] & inside[None, :]
            counts = tl.load(counts_ptr + cells, mask=mask, other=0)
            earlier = tl.cumsum(counts, axis=0) - counts
            tl.store(counts_ptr + cells, before[None, :] + earlier, mask=mask)
            before += tl.sum(counts, axis=0)
        tl.store(totals_ptr + chain * num_experts + experts, before - before_chain, mask=inside)


@triton.jit(do_not_specialize=["num_blocks", "length", "num_tokens", "time", "batch"])
def _place_kernel(
    ids_ptr,
    order_ptr,
    starts_ptr,
    slots_ptr,
    num_blocks,
    length,
    num_tokens,
    top_k,
    num_experts,
    time,
    batch,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
    PEERS: tl.constexpr,
):
    block = tl.program_id(0)
    chain, first = block // num_blocks, block % num_blocks * BLOCK
    positions = first + tl.arange(0, BLOCK)
    copies, ids = _copies_at(
        ids_ptr, order_ptr, chain, positions, length, num_experts, time, batch, HAS_ORDER
    )
    asks = ids < num_experts
    slots = tl.load(starts_ptr + block.to(tl.int64) * num_experts + ids, mask=asks, other=0)
    for shift in range(0, BLOCK, PEERS):
        peers = first + shift + tl.arange(0, PEERS)
        _, peer_ids = _copies_at(
            ids_ptr, order_ptr, chain, peers, length, num_experts, time, batch, HAS_ORDER
        )
        before = (ids[:, None] == peer_ids[None, :]) & (peers[None, :] < positions[:, None])
        slots += tl.sum(before.to(tl.int32), axis=1)
    where = copies % num_tokens * top_k + copies // num_tokens
    tl.store(slots_ptr + where, tl.where(asks, slots, -1), mask=positions < length)
