"""Launches Triton kernels, and selects launch parameters: hardware, tile, precision, descriptors (TMA)."""

import functools
import threading
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fairseq_tutel.kernels import interpreted
from fairseq_tutel.kernels.tiles import Tile, choose

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton supports only plain loads
    TensorDescriptor = None

DESCRIPTORS = ("sm_90", "sm_100", "sm_120")  # hardware with TMA
ALIGNMENT = 16  # bytes; TMA requires it for a tensor's address and all strides except the innermost


class _Bound(threading.local):
    """The devices whose CUDA context this thread has made current with a first operation."""

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()


_BOUND = _Bound()


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any
) -> None:
    """Launch a Triton kernel on the current stream of a device; every launch of the package is here.

    A new thread has no CUDA context, and a launch with tensor descriptors needs one. So the first launch of
    a thread on a device binds the context.

    Args:
        kernel: a function decorated with triton.jit.
        grid: the number of programs in one to three dimensions.
        device: the device of the tensors.
        arguments: tensors, tensor descriptors, numbers or None, in the kernel's order.
        constants: compile-time constants and Triton's options, such as num_warps.
    """
    if device.type != "cuda":  # the interpreter
        kernel[grid](*arguments, **constants)
        return
    with torch.cuda.device(device.index):
        if device not in _BOUND.devices:
            # torch.cuda.stream and torch.cuda.set_device to the current device do not bind.
            torch.zeros(1, device=device)
            _BOUND.devices.add(device)
        kernel[grid](*arguments, **constants)


@functools.cache
def hardware_of(device: torch.device) -> str:
    """Return the hardware class of a device: a member of HARDWARE in tiles, or "interpreted"."""
    if interpreted():
        return "interpreted"
    if torch.version.hip is not None:
        return "amd"
    return hardware_class(torch.cuda.get_device_capability(device)[0])


def hardware_class(major: int) -> str:
    """Return the hardware class of an NVIDIA GPU, from the first number of its compute capability."""
    if major < 9:
        return "sm_80"
    if major == 9:
        return "sm_90"
    return "sm_100" if major < 12 else "sm_120"


def precision_of(dtype: torch.dtype, tf32x3: bool = False) -> str:
    """Return the precision of a dtype's matrix products: one of PRECISIONS in tiles.

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


def chosen(kind: str, rows: Tensor, shape: tuple[int, int, int, int], tf32x3: bool = False) -> Tile:
    """Return the tile of a grouped matrix product with these rows; `shape` is the end of `choose`."""
    return choose(kind, hardware_of(rows.device), precision_of(rows.dtype, tf32x3), *shape)


def accumulator_of(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which products are summed: fp64 for fp64, otherwise fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def has_descriptors(device: torch.device) -> bool:
    """Return whether kernels on this device can load tiles with tensor descriptors (TMA)."""
    return TensorDescriptor is not None and hardware_of(device) in DESCRIPTORS


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
    tile: Tile,
    tf32x3: bool,
    are_gathered: bool = False,
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the arguments of a product's kernel for rows and weights, and its constants and options.

    Rows and weights are TMA descriptors if all of them support TMA, otherwise tensors.

    Args:
        rows: the rows of each product.
        weights_ENK: the weights of each product, with equal strides; see `alike`.
        tile: the tile sizes.
        tf32x3: whether to compute fp32 products as three TF32 products.
        are_gathered: whether the kernel reads the rows through an index map.
    """
    rows_read = None if are_gathered else described(rows, [tile.block_m, tile.block_k])
    k_inner = weights_ENK[0].stride(2) == 1
    if k_inner:
        weights_read = described(weights_ENK, [1, tile.block_n, tile.block_k])
    else:
        weights_read = described([w.mT for w in weights_ENK], [1, tile.block_k, tile.block_n])
    constants = {
        "PRECISION": input_precision_of(rows[0], tf32x3),
        "ACC": accumulator_of(rows[0].dtype),
        "ROWS_DESCRIPTOR": rows_read is not None,
        "WEIGHT_DESCRIPTOR": weights_read is not None,
        "K_INNER": k_inner,
        **tile.blocks,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
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
