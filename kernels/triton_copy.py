"""A Triton kernel that reorders blocks of equal size, to regroup rows around an all-to-all.

R rows, D model_dim, A and B the numbers of blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels.opaque import opaque
from fairseq_tutel.kernels.triton_launch import launch

BLOCK = 2048  # elements per program; not tuned


def _fake_stride_copy(rows_RD: Tensor, outer: int, inner: int) -> Tensor:
    return rows_RD.new_empty(rows_RD.shape)


@opaque(_fake_stride_copy)
def stride_copy(rows_RD: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder the blocks of rows from [outer, inner, n, D] to [inner, outer, n, D]."""
    rows_RD = rows_RD.contiguous()
    out_RD = torch.empty_like(rows_RD)
    if out_RD.numel() == 0:
        return out_RD
    size = rows_RD.numel() // (outer * inner)
    # One dimension, because the others of a grid end at 65,535.
    launch(
        _stride_copy_kernel,
        (triton.cdiv(size, BLOCK) * outer * inner,),
        rows_RD.device,
        rows_RD,
        out_RD,
        outer,
        inner,
        size,
        BLOCK=BLOCK,
    )
    return out_RD


# `size` is specialized, so that accesses are 16 bytes wide if it is a multiple of 16.
@triton.jit(do_not_specialize=["outer", "inner"])
def _stride_copy_kernel(rows_ptr, out_ptr, outer, inner, size, BLOCK: tl.constexpr):
    chunks = tl.cdiv(size, BLOCK)
    to_block = tl.program_id(0) // chunks
    within = (tl.program_id(0) % chunks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = within < size
    from_block = to_block % outer * inner + to_block // outer
    values = tl.load(rows_ptr + from_block.to(tl.int64) * size + within, mask=inside)
    tl.store(out_ptr + to_block.to(tl.int64) * size + within, values, mask=inside)
