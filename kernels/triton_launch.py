"""Selects launch parameters of matrix products: hardware, precision, tensor descriptors (TMA)."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels import interpreted
from fairseq_tutel.kernels.tiles_config import Config, choose

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton supports only plain loads
    TensorDescriptor = None

ALIGNMENT = 16  # bytes; TMA requires it for a tensor's address and all strides except the innermost


@functools.cache
def hardware_of(device: torch.device) -> str:
    """Return the hardware class of a device: a member of HARDWARE in tiles_config, or "interpreted"."""
    if interpreted():
        return "interpreted"
    if torch.version.hip is not None:
        return "amd"
    return "hopper" if torch.cuda.get_device_capability(device) >= (9, 0) else "ampere"


def precision_of(dtype: torch.dtype, tf32x3: bool = False) -> str:
    """Return the precision of a dtype's matrix products: one of PRECISIONS in tiles_config.

    fp32 is "ieee", or "tf32" if torch allows it. With `tf32x3` it is "tf32x3" on an NVIDIA GPU.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return "half"
    if dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    if tf32x3:
        return "tf32x3"
    switch = torch.backends.cuda.matmul
    # torch raises an error if allow_tf32 is read after fp32_precision was set.
    newer = getattr(switch, "fp32_precision", None)
    return "tf32" if (newer == "tf32" if newer else switch.allow_tf32) else "ieee"


def chosen(
    kind: str,
    rows: Tensor,
    shape: tuple[int, int, int, int],
    launch: Callable[[Config], None],
    tf32x3: bool = False,
) -> Config:
    """Return the tile configuration for a grouped matrix product with these rows; see `choose`."""
    return choose(kind, hardware_of(rows.device), precision_of(rows.dtype, tf32x3), shape, launch)


def accumulator_of(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which products are summed: fp64 for fp64, otherwise fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def has_descriptors(device: torch.device) -> bool:
    """Return whether kernels on this device can load tiles with tensor descriptors (TMA)."""
    return TensorDescriptor is not None and hardware_of(device) == "hopper"


def input_precision_of(rows: Tensor, tf32x3: bool = False) -> str:
    """Return the precision constant for the kernels' matrix products; on a GPU it affects only fp32."""
    if hardware_of(rows.device) == "interpreted" and rows.dtype == torch.bfloat16:
        return "interpreted"
    precision = precision_of(rows.dtype, tf32x3)
    return "ieee" if precision == "half" else precision


def described(tensors: list[Tensor], block: list[int]) -> list[Any] | None:
    """Return TMA descriptors that load tiles of shape `block`; None if a tensor does not support TMA."""
    if not all(has_descriptors(t.device) and _is_describable(t) for t in tensors):
        return None
    return [TensorDescriptor(t, list(t.shape), list(t.stride()), block) for t in tensors]


def operands(
    rows: list[Tensor],
    weights_ENK: list[Tensor],
    config: Config,
    tf32x3: bool,
    are_gathered: bool = False,
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the arguments of a product's kernel for rows and weights, and its constants and options.

    Rows and weights are TMA descriptors if all of them support TMA, otherwise tensors.

    Args:
        rows: the rows of each product.
        weights_ENK: the weights of each product, with equal strides; see `alike`.
        config: the tile sizes.
        tf32x3: whether to compute fp32 products as three TF32 products.
        are_gathered: whether the kernel reads the rows through an index map.
    """
    rows_read = None if are_gathered else described(rows, [config.block_m, config.block_k])
    k_inner = weights_ENK[0].stride(2) == 1
    if k_inner:
        weights_read = described(weights_ENK, [1, config.block_n, config.block_k])
    else:
        weights_read = described([w.mT for w in weights_ENK], [1, config.block_k, config.block_n])
    constants = {
        "PRECISION": input_precision_of(rows[0], tf32x3),
        "ACC": accumulator_of(rows[0].dtype),
        "ROWS_DESCRIPTOR": rows_read is not None,
        "WEIGHT_DESCRIPTOR": weights_read is not None,
        "K_INNER": k_inner,
        **config.blocks,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    return rows_read or rows, weights_read or weights_ENK, constants


def alike(weights: list[Tensor]) -> list[Tensor]:
    """Return the weights with equal strides; if their strides differ, copy them to contiguous tensors."""
    if all(w.stride() == weights[0].stride() for w in weights):
        return weights
    return [w.contiguous() for w in weights]


def _is_describable(tensor: Tensor) -> bool:
    size = tensor.element_size()
    return (
        tensor.stride(-1) == 1
        and all(stride * size % ALIGNMENT == 0 for stride in tensor.stride()[:-1])
        and tensor.data_ptr() % ALIGNMENT == 0
        and tensor.numel() > 0
    )
