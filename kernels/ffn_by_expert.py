"""The FFN of all experts on a CPU, computed expert by expert to keep each expert's data in cache.

- Rows are gathered just before they are multiplied.
- The gradient of the hidden rows exists for only one block at a time.
- Every product writes directly into its output.
- A block holds the rows of one expert, or of several experts with few rows. Elementwise operations run once
  per block.

The results equal those of `ffn_by_products`, and tests compare the two. N source rows, D model_dim,
H hidden_dim, E experts, R rows (n in one block), B blocks, I and O the input and output dimensions of a
linear map.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.kernels import thread_pool
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.opaque import untraced
from fairseq_tutel.kernels.products import linear, weight_grad
from fairseq_tutel.kernels.weights import FFNGradients, FFNWeights, SavedActivations

# The largest size in bytes of a block's hidden rows, so that they stay in cache between two products.
BLOCK_BYTES = 2**19


@dataclass(frozen=True)
class Block:
    """A block of rows that are computed together. The rows belong to one or several consecutive experts.

    Attributes:
        rows: the rows of all experts of the block.
        experts: the indices of these experts.
        counts: the number of rows of each expert.
    """

    rows: slice
    experts: tuple[int, ...]
    counts: tuple[int, ...]


def blocks_of(counts: Sequence[int], most: int) -> list[Block]:
    """Divide the rows into blocks of one expert, or of several experts with at most `most` rows in all."""
    blocks, first, end = [], 0, 0
    inside: list[tuple[int, int]] = []

    def close() -> None:
        if inside:
            experts, of_each = zip(*inside, strict=True)
            blocks.append(Block(slice(first, end), experts, of_each))

    for expert, count in enumerate(counts):
        if count == 0:
            continue
        if end + count - first > most:
            close()
            inside, first = [], end
        inside.append((expert, count))
        end += count
    close()
    return blocks


@untraced
def ffn_forward(
    x_ND: Tensor, index_R: Tensor | None, weights: FFNWeights, groups: Groups, activation: str, keep: bool
) -> tuple[Tensor, SavedActivations]:
    """Return the FFN output of every row [R, D], and the activations that backward needs."""
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    y_RD = x_ND.new_empty(num_rows, weights.fc2_weight.shape[1])
    saved = _up(x_ND, index_R, weights, groups, activation, keep, y_RD)
    clear_tail(y_RD, groups)
    return y_RD, saved


@untraced
def ffn_activations(
    x_ND: Tensor, index_R: Tensor | None, weights: FFNWeights, groups: Groups, activation: str
) -> SavedActivations:
    """Compute the activations that backward needs, without the FFN's output."""
    return _up(x_ND, index_R, weights, groups, activation, True, None)


def _up(
    x_ND: Tensor,
    index_R: Tensor | None,
    weights: FFNWeights,
    groups: Groups,
    activation: str,
    keep: bool,
    y_RD: Tensor | None,
) -> SavedActivations:
    """Run the FFN, write its output to y_RD if y_RD is given, and return activations for backward."""
    w, blocks = weights, _blocks(weights, groups, x_ND)
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    hidden_dim = w.fc1_weight.shape[1]
    kind = ACTIVATIONS["swish" if w.is_glu else activation]
    h_RH = x_ND.new_empty(num_rows, hidden_dim) if keep else None
    g_RH = x_ND.new_empty(num_rows, hidden_dim) if keep and w.is_glu else None
    h_BnH, g_BnH, y_BnD = (_parts(rows, blocks) for rows in (h_RH, g_RH, y_RD))
    of_each, make_reader = w.of_each(), _readers(x_ND, index_R, blocks)

    def hidden(saved_nH: Tensor | None, x_nD: Tensor) -> Tensor:
        return x_nD.new_empty(len(x_nD), hidden_dim) if saved_nH is None else saved_nH

    def worker() -> thread_pool.Worker:
        x_of = make_reader()

        def run(number: int) -> None:
            x_nD, block, y_nD = x_of(number), blocks[number], y_BnD[number]
            h_nH = hidden(h_BnH[number], x_nD)
            a_nH = kind.forward(_linear(x_nD, of_each.fc1_weight, of_each.fc1_bias, block, h_nH))
            if w.is_glu:
                g_nH = hidden(g_BnH[number], x_nD)
                a_nH.mul_(_linear(x_nD, of_each.fc3_weight, of_each.fc3_bias, block, g_nH))
            if y_nD is not None:
                _linear(a_nH, of_each.fc2_weight, of_each.fc2_bias, block, y_nD)

        return run

    thread_pool.for_each(worker, _sizes(blocks), _row_work(x_ND, hidden_dim))
    if w.is_glu or not kind.keeps_output:
        return SavedActivations(h_RH=h_RH, g_RH=g_RH)
    return SavedActivations(a_RH=h_RH)  # the activation was computed in place, in h_RH


@untraced
def ffn_backward(
    dy_ND: Tensor,
    x_ND: Tensor,
    index_R: Tensor | None,
    gate_N: Tensor | None,
    source_R: Tensor | None,
    weights: FFNWeights,
    saved: SavedActivations,
    groups: Groups,
    activation: str,
    needs_dx: bool,
    needs_weights: bool,
) -> FFNGradients:
    """Return the gradients of input, gates and weights; the arguments are as in `ffn_by_products`."""
    w, blocks = weights, _blocks(weights, groups, x_ND)
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    kind = ACTIVATIONS["swish" if w.is_glu else activation]
    gate_R = None
    if gate_N is not None and source_R is not None:
        gate_R = gate_N.index_select(0, source_R.clamp_min(0))
    grads = FFNGradients.empty_like(w, num_rows, gate_R, needs_dx, needs_weights)
    outs = grads.weights
    hidden_dim = w.fc1_weight.shape[1]
    a_BnH, h_BnH, g_BnH = (_parts(t, blocks) for t in (saved.a_RH, saved.h_RH, saved.g_RH))
    dgate_R = None if grads.gate_PR is None else grads.gate_PR[0]
    dgate_Bn, dx_BnD = (_parts(t, blocks) for t in (dgate_R, grads.x_RD))
    of_each, douts = w.of_each(), None if outs is None else outs.of_each()
    dy_reader, x_reader = (_readers(rows, index_R, blocks) for rows in (dy_ND, x_ND))
    make_places = _places(dy_ND, hidden_dim, blocks)
    gate_Bn1 = _parts(None if gate_R is None else gate_R.unsqueeze(1).to(dy_ND.dtype), blocks)

    def worker() -> thread_pool.Worker:
        dy_of, x_of = dy_reader(), x_reader()
        place_of = make_places()

        def run(number: int) -> None:
            dy_nD, x_nD, block = dy_of(number), x_of(number), blocks[number]
            h_nH, g_nH, dx_nD = h_BnH[number], g_BnH[number], dx_BnD[number]
            a_nH = a_BnH[number]
            if a_nH is None:
                a_nH = kind.forward(h_nH) if g_nH is None else kind.forward(h_nH).mul_(g_nH)
            da_nH = _times(dy_nD, of_each.fc2_weight, block, place_of(number))
            if gate_R is not None:
                dgate_n = dgate_Bn[number].copy_(torch.linalg.vecdot(da_nH, a_nH))
                if of_each.fc2_bias is not None:
                    for e, dy, dgate in _by_expert(block, dy_nD, dgate_n):
                        dgate += dy @ of_each.fc2_bias[e]
                da_nH.mul_(gate_Bn1[number])
                dy_nD.mul_(gate_Bn1[number])  # in place, because with gates, dy_nD is a gathered copy
            if douts is not None:
                _outer(dy_nD, a_nH, douts.fc2_weight, douts.fc2_bias, block)
            dg_nH = None
            if g_nH is not None:
                dg_nH = F.silu(h_nH).mul_(da_nH)
                da_nH.mul_(g_nH)
            dh_nH = kind.backward(da_nH, a_nH if h_nH is None else h_nH)
            if douts is not None:
                _outer(dh_nH, x_nD, douts.fc1_weight, douts.fc1_bias, block)
                if dg_nH is not None:
                    _outer(dg_nH, x_nD, douts.fc3_weight, douts.fc3_bias, block)
            if dx_nD is not None:
                _times(dh_nH, of_each.fc1_weight, block, dx_nD)
                if dg_nH is not None:
                    for e, dg, dx in _by_expert(block, dg_nH, dx_nD):
                        dx.addmm_(dg, of_each.fc3_weight[e])

        return run

    thread_pool.for_each(worker, _sizes(blocks), _row_work(x_ND, hidden_dim))
    if outs is not None:
        _clear(outs, groups.host)
    if grads.x_RD is not None:
        clear_tail(grads.x_RD, groups)
    return grads


def _linear(rows_nI: Tensor, weight_EOI: Any, bias_EO: Any, block: Block, out_nO: Tensor) -> Tensor:
    """For each expert's rows, write rows @ weight.T + bias into `out_nO`. Return `out_nO`."""
    for e, rows, out in _by_expert(block, rows_nI, out_nO):
        linear(rows, weight_EOI[e], None if bias_EO is None else bias_EO[e], out)
    return out_nO


def _times(dout_nO: Tensor, weight_EOI: Any, block: Block, out_nI: Tensor) -> Tensor:
    """For each expert's rows, write the input gradient dout @ weight into `out_nI`. Return `out_nI`."""
    for e, dout, out in _by_expert(block, dout_nO, out_nI):
        torch.mm(dout, weight_EOI[e], out=out)
    return out_nI


def _outer(dout_nO: Tensor, rows_nI: Tensor, dweight_EOI: Any, dbias_EO: Any, block: Block) -> None:
    """Write the gradients of the weight and bias of a linear map, for each expert in a block."""
    for e, dout, rows in _by_expert(block, dout_nO, rows_nI):
        weight_grad(dout, rows, dweight_EOI[e], None if dbias_EO is None else dbias_EO[e])


def _by_expert(block: Block, *rows: Tensor) -> Iterable[tuple[Any, ...]]:
    """Return each expert of a block, together with the expert's rows of every tensor."""
    if len(block.experts) == 1:
        return ((block.experts[0], *rows),)
    return zip(block.experts, *(each.split(block.counts) for each in rows), strict=True)


def _blocks(weights: FFNWeights, groups: Groups, x_ND: Tensor) -> list[Block]:
    """Return the blocks of rows to compute together. With several threads, each block has one expert."""
    row_bytes = weights.fc1_weight.shape[1] * x_ND.itemsize
    return blocks_of(groups.host, BLOCK_BYTES // row_bytes if torch.get_num_threads() == 1 else 0)


def _row_work(x_ND: Tensor, hidden_dim: int) -> int:
    """Return the number of multiplications of a row with a weight; 0 on a GPU, to use only one thread."""
    return x_ND.shape[1] * hidden_dim if x_ND.device.type == "cpu" else 0


def _sizes(blocks: Sequence[Block]) -> list[int]:
    """Return the number of rows of every block."""
    return [sum(block.counts) for block in blocks]


def _parts(rows: Tensor | None, blocks: Sequence[Block]) -> Sequence[Any]:
    """Split a tensor into one view per block of rows. If `rows` is None, return None for every block.

    All views are created at once. Creating a view takes a microsecond, and Python threads would have to
    create views one at a time.
    """
    if rows is None or not blocks:
        return [None] * len(blocks)
    return rows[: blocks[-1].rows.stop].split(_sizes(blocks))


def _readers(
    x_ND: Tensor, index_R: Tensor | None, blocks: Sequence[Block]
) -> Callable[[], Callable[[int], Tensor]]:
    """Return a factory, from which each thread gets a function that maps a block's number to its rows.

    If the rows must be gathered, the function writes the rows of every block into the same buffer, which
    stays in cache.
    """
    if index_R is None:
        x_BnD = _parts(x_ND, blocks)
        return lambda: lambda number: x_BnD[number]
    index_Bn, make_places = _parts(index_R, blocks), _places(x_ND, x_ND.shape[1], blocks)

    def reader() -> Callable[[int], Tensor]:
        place_of = make_places()
        return lambda number: torch.index_select(x_ND, 0, index_Bn[number], out=place_of(number))

    return reader


def _places(rows: Tensor, width: int, blocks: Sequence[Block]) -> Callable[[], Callable[[int], Tensor]]:
    """Return a factory, from which each thread gets a function that maps a block's number to a buffer.

    A thread uses the same memory for all its blocks, so that this memory stays in cache.
    """
    sizes = _sizes(blocks)

    def places() -> Callable[[int], Tensor]:
        place = rows.new_empty(max(sizes, default=0), width)
        return lambda number: place[: sizes[number]]

    return places


def _clear(weights: FFNWeights, counts: Sequence[int]) -> None:
    """Set the weight gradients of experts without rows to 0."""
    for tensor in weights:
        if tensor is not None:
            for e in (e for e, count in enumerate(counts) if count == 0):
                tensor[e].zero_()


def clear_tail(rows: Tensor, groups: Groups) -> Tensor:
    """Set the rows after the last group, which belong to no expert, to 0; return the complete tensor."""
    used = sum(groups.host)
    if used < rows.shape[0]:
        rows[used:] = 0
    return rows
