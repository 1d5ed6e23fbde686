"""The experts' feed-forward one expert after the other, for CPUs: what an expert touches stays in cache.

Rows are gathered where they are multiplied, h's gradient lives for one block at a time, and every product
is written straight into its place. A block is the rows of one expert, or of several that have few: what is
no product is done for them at once. The same function as `ffn_by_products`, which is its oracle. N rows of
a source, D model_dim, H hidden_dim, E experts, R rows (n of one block), I and O what a map reads and gives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.kernels import team
from fairseq_tutel.kernels.activations import ACTIVATIONS, Activation
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.products import linear, weight_grad
from fairseq_tutel.kernels.weights import FFNGradients, FFNWeights, Kept

# Of a block's hidden rows, which stay in cache between the products that write and read them.
BLOCK_BYTES = 2**21


@dataclass(frozen=True)
class Block:
    """Neighbouring experts that have rows.

    Attributes:
        rows: of all of them.
        experts: which they are.
        counts: rows of each.
    """

    rows: slice
    experts: tuple[int, ...]
    counts: tuple[int, ...]


def blocks_of(counts: Sequence[int], most: int) -> list[Block]:
    """Return the experts that have rows, in blocks of at most so many rows or of one expert."""
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


def ffn_forward(
    x_ND: Tensor,
    index_R: Tensor | None,
    weights: FFNWeights,
    groups: Groups,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Kept]:
    """Return every row's output [R, D] and what backward needs; see `ffn_by_products.ffn_forward`."""
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    y_RD = x_ND.new_empty(num_rows, weights.fc2_weight.shape[1])
    kept = _up(x_ND, index_R, weights, groups, activation, keep, y_RD)
    clear_tail(y_RD, groups)
    return y_RD, kept


def ffn_kept(
    x_ND: Tensor, index_R: Tensor | None, weights: FFNWeights, groups: Groups, activation: str
) -> Kept:
    """Return what backward needs alone; see `ffn_by_products.ffn_kept`."""
    return _up(x_ND, index_R, weights, groups, activation, True, None)


def _up(
    x_ND: Tensor,
    index_R: Tensor | None,
    weights: FFNWeights,
    groups: Groups,
    activation: str,
    keep: bool,
    y_RD: Tensor | None,
) -> Kept:
    """Write every row's output into y_RD, where that is wanted, and return what backward needs."""
    w, blocks = weights, _blocks(weights, groups, x_ND)
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    hidden_dim = w.fc1_weight.shape[1]
    kind = ACTIVATIONS["swish" if w.is_glu else activation]
    h_RH = x_ND.new_empty(num_rows, hidden_dim) if keep else None
    g_RH = x_ND.new_empty(num_rows, hidden_dim) if keep and w.is_glu else None

    def worker() -> Callable[[Block], None]:
        x_of = _reader(x_ND, index_R, blocks)

        def run(block: Block) -> None:
            x_nD = x_of(block)
            h_nH, g_nH, y_nD = (_part(rows, block) for rows in (h_RH, g_RH, y_RD))
            a_nH = kind.forward(_linear(x_nD, w.fc1_weight, w.fc1_bias, block, h_nH))
            if w.fc3_weight is not None:
                a_nH = a_nH.mul_(_linear(x_nD, w.fc3_weight, w.fc3_bias, block, g_nH))
            if y_nD is not None:
                _linear(a_nH, w.fc2_weight, w.fc2_bias, block, y_nD)

        return run

    _for_each(worker, blocks, x_ND.shape[1] * hidden_dim)
    if w.is_glu or not kind.keeps_output:
        return Kept(h_RH=h_RH, g_RH=g_RH)
    return Kept(a_RH=h_RH)  # the activation was in place


def ffn_backward(
    dy_ND: Tensor,
    x_ND: Tensor,
    index_R: Tensor | None,
    gate_R: Tensor | None,
    weights: FFNWeights,
    kept: Kept,
    groups: Groups,
    activation: str,
    needs_dx: bool,
    needs_weights: bool,
) -> FFNGradients:
    """Return all gradients; see `ffn_by_products.ffn_backward`."""
    w, blocks = weights, _blocks(weights, groups, x_ND)
    num_rows = x_ND.shape[0] if index_R is None else index_R.shape[0]
    kind = ACTIVATIONS["swish" if w.is_glu else activation]
    grads = FFNGradients.empty_like(w, num_rows, gate_R, needs_dx, needs_weights)
    outs = grads.weights
    hidden_dim = w.fc1_weight.shape[1]

    def worker() -> Callable[[Block], None]:
        dy_of, x_of = _reader(dy_ND, index_R, blocks), _reader(x_ND, index_R, blocks)
        place_RH = dy_ND.new_empty(_most_rows(blocks), hidden_dim)

        def run(block: Block) -> None:
            dy_nD, x_nD = dy_of(block), x_of(block)
            a_nH, h_nH, g_nH = _hidden(kind, kept, block)
            da_nH = _times(dy_nD, w.fc2_weight, block, place_RH[: len(dy_nD)])
            gate_n, dgate_n, dx_nD = (_part(t, block) for t in (gate_R, grads.gate_R, grads.x_RD))
            if gate_n is not None:
                dgate_n.copy_(torch.linalg.vecdot(da_nH, a_nH))
                if w.fc2_bias is not None:
                    for e, dy, dgate in _by_expert(block, dy_nD, dgate_n):
                        dgate += dy @ w.fc2_bias[e]
                gate_n1 = gate_n.unsqueeze(1).to(dy_nD.dtype)
                da_nH.mul_(gate_n1)
                dy_nD.mul_(gate_n1)  # a gathered copy, as gates come with an index
            if outs is not None:
                _outer(dy_nD, a_nH, outs.fc2_weight, outs.fc2_bias, block)
            dg_nH = None
            if g_nH is not None:
                dg_nH = F.silu(h_nH).mul_(da_nH)
                da_nH.mul_(g_nH)
            dh_nH = kind.backward(da_nH, a_nH if h_nH is None else h_nH)
            if outs is not None:
                _outer(dh_nH, x_nD, outs.fc1_weight, outs.fc1_bias, block)
                if dg_nH is not None:
                    _outer(dg_nH, x_nD, outs.fc3_weight, outs.fc3_bias, block)
            if dx_nD is not None:
                _times(dh_nH, w.fc1_weight, block, dx_nD)
                if dg_nH is not None and w.fc3_weight is not None:
                    for e, dg, dx in _by_expert(block, dg_nH, dx_nD):
                        dx.addmm_(dg, w.fc3_weight[e])

        return run

    _for_each(worker, blocks, x_ND.shape[1] * hidden_dim)
    if outs is not None:
        _clear(outs, groups.host)
    if grads.x_RD is not None:
        clear_tail(grads.x_RD, groups)
    return grads


def _hidden(kind: Activation, kept: Kept, block: Block) -> tuple[Tensor, Any, Tensor | None]:
    """Return (a, h, g) of a block, with a made of the others where it was not kept."""
    a_nH, h_nH, g_nH = (_part(rows, block) for rows in (kept.a_RH, kept.h_RH, kept.g_RH))
    if a_nH is None:
        a_nH = kind.forward(h_nH)
        if g_nH is not None:
            a_nH = a_nH.mul_(g_nH)
    return a_nH, h_nH, g_nH


def _linear(
    rows_nI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, block: Block, out_nO: Tensor | None
) -> Tensor:
    """Return rows @ weight.T + bias, of each row's own expert; written into `out_nO` if that is given."""
    if out_nO is None:
        out_nO = rows_nI.new_empty(len(rows_nI), weight_EOI.shape[1])
    for e, rows, out in _by_expert(block, rows_nI, out_nO):
        linear(rows, weight_EOI[e], None if bias_EO is None else bias_EO[e], out)
    return out_nO


def _times(dout_nO: Tensor, weight_EOI: Tensor, block: Block, out_nI: Tensor) -> Tensor:
    """Write dout @ weight of every row's own expert into `out_nI` and return it."""
    for e, dout, out in _by_expert(block, dout_nO, out_nI):
        torch.mm(dout, weight_EOI[e], out=out)
    return out_nI


def _outer(
    dout_nO: Tensor, rows_nI: Tensor, dweight_EOI: Any, dbias_EO: Tensor | None, block: Block
) -> None:
    """Write the gradient of each expert's weight, and of its bias."""
    for e, dout, rows in _by_expert(block, dout_nO, rows_nI):
        weight_grad(dout, rows, dweight_EOI[e], None if dbias_EO is None else dbias_EO[e])


def _by_expert(block: Block, *rows: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield each expert of a block with its rows."""
    return zip(block.experts, *(each.split(block.counts) for each in rows), strict=True)


def _blocks(weights: FFNWeights, groups: Groups, x_ND: Tensor) -> list[Block]:
    """Return the experts in blocks; several threads take them one by one."""
    row_bytes = weights.fc1_weight.shape[1] * x_ND.itemsize
    return blocks_of(groups.host, BLOCK_BYTES // row_bytes if torch.get_num_threads() == 1 else 0)


def _for_each(
    make_worker: Callable[[], Callable[[Block], None]], blocks: Sequence[Block], row_work: int
) -> None:
    """Call a worker once for every block; see `team.for_each`."""

    def by_number() -> team.Worker:
        worker = make_worker()
        return lambda number: worker(blocks[number])

    team.for_each(by_number, [sum(block.counts) for block in blocks], row_work)


def _most_rows(blocks: Sequence[Block]) -> int:
    return max((sum(block.counts) for block in blocks), default=0)


def _reader(
    x_ND: Tensor, index_R: Tensor | None, blocks: Sequence[Block]
) -> Callable[[Block], Tensor]:
    """Return what reads the rows of a block, each time into the same place, which is in cache."""
    if index_R is None:
        return lambda block: x_ND[block.rows]
    place_RD = x_ND.new_empty(_most_rows(blocks), x_ND.shape[1])
    index: Tensor = index_R

    def read(block: Block) -> Tensor:
        index_n = index[block.rows]
        return torch.index_select(x_ND, 0, index_n, out=place_RD[: len(index_n)])

    return read


def _part(rows: Tensor | None, block: Block) -> Any:
    """Return the block's rows; None where there are none."""
    return None if rows is None else rows[block.rows]


def _clear(weights: FFNWeights, counts: Sequence[int]) -> None:
    """Set the gradients of experts without rows to 0."""
    for tensor in weights.tensors():
        if tensor is not None:
            for e in (e for e, count in enumerate(counts) if count == 0):
                tensor[e].zero_()


def clear_tail(rows: Tensor, groups: Groups) -> Tensor:
    """Return the rows, those behind the last group set to 0."""
    used = sum(groups.host)
    if used < rows.shape[0]:
        rows[used:] = 0
    return rows
