"""Arguments of every op of `fairseq_tutel.kernels`, and what it moves or computes with them.

An op without a row here is reported as not run. T tokens, D model_dim, K top_k, R = T * K rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the layer that the ops are part of: T, D, K."""

    tokens: int
    model_dim: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an op.

    Attributes:
        arguments: positional.
        work: floating point operations, or bytes that must be read and written at least.
        unit: of `work` in a second.
    """

    arguments: tuple[Any, ...]
    work: int
    unit: str = "B/s"


SIZES = {
    "cpu": {
        "k1": Sizes(tokens=4096, model_dim=512, top_k=1),
        "k2": Sizes(tokens=4096, model_dim=512, top_k=2),
        "k8": Sizes(tokens=4096, model_dim=512, top_k=8),
    },
    "cuda": {
        "k1": Sizes(tokens=32768, model_dim=1024, top_k=1),
        "k2": Sizes(tokens=32768, model_dim=2048, top_k=2),
        "k8": Sizes(tokens=32768, model_dim=2048, top_k=8),
    },
}
TINY = Sizes(tokens=16, model_dim=8, top_k=2)


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Tensors that ops share, on the device: of a dropless layer, whose rows are in random order.

    Attributes:
        x_TD, y_TD, rows_RD: values in the benchmark's dtype.
        weights_TK: fp32, or fp64 for fp64 values.
        row_of_TK, source_of_R: int64, each the other's inverse.
    """

    x_TD: Tensor
    y_TD: Tensor
    rows_RD: Tensor
    weights_TK: Tensor
    row_of_TK: Tensor
    source_of_R: Tensor


def make_maps(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Maps:
    """Return the tensors of a size."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rows = sizes.tokens * sizes.top_k
    source_of_R = torch.randperm(rows, generator=generator, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    return Maps(
        x_TD=normal(sizes.tokens, sizes.model_dim).to(dtype),
        y_TD=normal(sizes.tokens, sizes.model_dim).to(dtype),
        rows_RD=normal(rows, sizes.model_dim).to(dtype),
        weights_TK=normal(sizes.tokens, sizes.top_k).to(wide),
        row_of_TK=source_of_R.argsort().view(sizes.tokens, sizes.top_k),
        source_of_R=source_of_R,
    )


def _gather_rows(maps: Maps) -> Call:
    index_R = maps.source_of_R // maps.row_of_TK.shape[1]
    scale_R = maps.weights_TK.flatten()[maps.source_of_R]
    # A token is read once for each of its copies.
    work = 2 * maps.rows_RD.nbytes + index_R.nbytes + scale_R.nbytes
    return Call(arguments=(maps.x_TD, index_R, scale_R), work=work)


def _gather_sum(maps: Maps) -> Call:
    work = _bytes(maps.rows_RD, maps.x_TD, maps.row_of_TK, maps.weights_TK)
    return Call(arguments=(maps.rows_RD, maps.row_of_TK, maps.weights_TK), work=work)


def _gather_dot(maps: Maps) -> Call:
    work = _bytes(maps.rows_RD, maps.y_TD, maps.row_of_TK, maps.weights_TK)
    return Call(arguments=(maps.rows_RD, maps.row_of_TK, maps.y_TD), work=work)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


CALLS: dict[str, Callable[[Maps], Call]] = {
    "gather_rows": _gather_rows,
    "gather_sum": _gather_sum,
    "gather_dot": _gather_dot,
}
