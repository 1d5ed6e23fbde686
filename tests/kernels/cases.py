"""The tests of all backends share these inputs of the gather ops."""

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# The largest allowed absolute and relative errors; in half precision, a backend may round each product.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Inputs:
    """Holds inputs x and y [T, D], rows [R, D], row_of and weights [T, K], index and scale [R]."""

    x_TD: Tensor
    y_TD: Tensor
    rows_RD: Tensor
    row_of_TK: Tensor
    weights_TK: Tensor
    index_R: Tensor
    scale_R: Tensor

    def to(self, device: str) -> "Inputs":
        """Return a copy of all tensors on `device`."""
        return Inputs(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def inputs(num_tokens: int, num_rows: int, top_k: int, model_dim: int, dtype: torch.dtype) -> Inputs:
    """Draw inputs; `row_of` and `index` have some entries -1, and `scale` is NaN where `index` is -1."""
    generator = torch.Generator().manual_seed(1000 * num_tokens + 100 * num_rows + 10 * top_k)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def index(below: int, *shape: int) -> Tensor:
        return torch.randint(-1, max(below, 0), shape, generator=generator)

    index_R = index(num_tokens, num_rows)
    scale_R = normal(num_rows, dtype=wide).masked_fill(index_R < 0, float("nan"))
    return Inputs(
        x_TD=normal(num_tokens, model_dim, dtype=dtype),
        y_TD=normal(num_tokens, model_dim, dtype=dtype),
        rows_RD=normal(num_rows, model_dim, dtype=dtype),
        row_of_TK=index(num_rows, num_tokens, top_k),
        weights_TK=normal(num_tokens, top_k, dtype=wide),
        index_R=index_R,
        scale_R=scale_R,
    )


# Each shape is (T, R, K, D). Some shapes have no tokens, no rows, one column, an odd D or a large K.
SHAPES = (
    (7, 9, 1, 5),
    (7, 12, 2, 8),
    (5, 16, 3, 33),
    (6, 10, 4, 1),
    (3, 20, 7, 6),
    (1, 1, 1, 3),
    (0, 4, 2, 3),
    (4, 0, 2, 3),
    (0, 0, 1, 3),
)


def name_of(value: object) -> str | None:
    """Return a readable test ID for a shape or dtype."""
    if isinstance(value, tuple):
        return "T{}-R{}-K{}-D{}".format(*value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None
