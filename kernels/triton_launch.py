"""Launches Triton kernels, and selects launch parameters: hardware, tile, precision, descriptors (TMA)."""

import functools
import threading
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from fairseq_tutel.kernels import interpreted
from fairseq_tutel.kernels.tiles import Tile, choose

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton supports only plain loads
    TensorDescriptor = None

DESCRIPTORS = ("sm_90", "sm_100", "sm_120")  # hardware with TMA
ALIGNMENT = 16  # bytes; TMA requires it for a tensor's address and all strides except the innermost
IS_HIP = torch.version.hip is not None


class _Compiled(threading.local):
    """The kernels that this thread has launched: by key, what its launches share."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[Any, ...], tuple[Any, ...]] = {}


_COMPILED = _Compiled()


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any
) -> None:
    """Launch a Triton kernel on the current stream of a device; all kernels are launched by this function.

    Triton takes several times as long to find a compiled kernel as to launch it. Therefore the first launch
    caches the kernel. The key has all properties of arguments for which Triton specializes kernels.

    Args:
        kernel: a function decorated with triton.jit.
        grid: the number of programs in one to three dimensions.
        device: the device of the tensors.
        arguments: tensors, tensor descriptors, numbers or None, in the kernel's order.
        constants: compile-time constants and Triton's options, such as num_warps, in the same order in all
            launches of a kernel.
    """
    if not is_direct(device):
        kernel[grid](*arguments, **constants)
        return
    active, index = driver.active, device.index
    if index != active.get_current_device():
        with torch.cuda.device(index):
            launch(kernel, grid, device, *arguments, **constants)
        return
    key: list[Any] = [kernel.fn, index, *constants.values()]
    add = key.append
    for argument in arguments:
        kind = type(argument)
        if kind is int:
            # 1, multiples of 16, and more than 32 bits
            add(-1 if argument == 1 else (argument >> 31) * 2 + (argument % ALIGNMENT == 0))
        elif argument is None:
            add(None)
        elif kind is TensorDescriptor:
            key += argument.base.dtype, *argument.block_shape
        else:
            add(argument.dtype)
            add(argument.data_ptr() % ALIGNMENT)
            if IS_HIP:
                add(argument.untyped_storage().nbytes() < 2**31)
    found = _COMPILED.by_key.get(tuple(key))
    if found is not None:
        compiled, run, fixed, rest = found
        x, y, z = (*grid, 1, 1)[:3]
        hooks = knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # of a profiler
            compiled[x, y, z](*arguments, *rest)
        else:  # the same, without the hooks' metadata, which takes as long as the rest of the launch
            run(x, y, z, active.get_current_stream(index), *fixed, *arguments, *rest)
        return
    # A new thread has no CUDA context, but a launch with tensor descriptors needs a context. Neither
    # torch.cuda.stream nor torch.cuda.set_device (to the current device) binds a context.
    torch.zeros(1, device=device)
    compiled = kernel[grid](*arguments, **constants)
    rest = [constants[name] for name in kernel.arg_names[len(arguments) :]]
    fixed = compiled.function, compiled.packed_metadata, None, None, None
    _COMPILED.by_key[tuple(key)] = compiled, compiled.run, fixed, rest


@functools.cache
def is_direct(device: torch.device) -> bool:
    """Return whether kernels on this device are compiled, rather than interpreted or traced."""
    return device.type == "cuda" and not interpreted()


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
    """Return the tile of a grouped product of rows; `shape` has the last four arguments of `choose`."""
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


def described(tensors: list[Tensor], block: tuple[int, ...], is_transposed: bool = False) -> Any:
    """Return TMA descriptors that load tiles of shape `block`; None if a tensor does not support TMA.

    With `is_transposed`, they describe tensors with the last two dimensions exchanged.
    """
    found = []
    for tensor in tensors:
        checked = _descriptor(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            block,
            is_transposed,
            has_descriptors(tensor.device),
        )
        if checked is None or tensor.data_ptr() % ALIGNMENT:
            return None
        descriptor = object.__new__(TensorDescriptor)  # without the checks, which take longer than a launch
        descriptor.__dict__.update(checked, base=tensor)
        found.append(descriptor)
    return found


@functools.lru_cache(maxsize=1024)
def _descriptor(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
    is_transposed: bool,
    has_tma: bool,
) -> dict[str, Any] | None:
    """Return the attributes of a tensor's descriptor; None if the tensor does not support TMA."""
    if is_transposed:
        shape, strides = ((*x[:-2], x[-1], x[-2]) for x in (shape, strides))
    if not has_tma or strides[-1] != 1 or 0 in shape:
        return None
    if any(stride * dtype.itemsize % ALIGNMENT for stride in strides[:-1]):
        return None
    like = torch.empty(1, dtype=dtype, device="meta")
    return vars(TensorDescriptor(like, list(shape), list(strides), list(block)))


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
    rows_read = None if are_gathered else described(rows, (tile.block_m, tile.block_k))
    k_inner = weights_ENK[0].stride(2) == 1
    block = (1, tile.block_n, tile.block_k) if k_inner else (1, tile.block_k, tile.block_n)
    weights_read = described(weights_ENK, block, is_transposed=not k_inner)
    constants = _constants(
        tile,
        input_precision_of(rows[0], tf32x3),
        rows[0].dtype,
        rows_read is not None,
        weights_read is not None,
        k_inner,
    )
    return rows_read or rows, weights_read or weights_ENK, constants


@functools.cache  # one entry per product of a model
def _constants(
    tile: Tile,
    precision: str,
    dtype: torch.dtype,
    describes_rows: bool,
    describes_weights: bool,
    k_inner: bool,
) -> dict[str, Any]:
    return {
        "PRECISION": precision,
        "ACC": accumulator_of(dtype),
        "ROWS_DESCRIPTOR": describes_rows,
        "WEIGHT_DESCRIPTOR": describes_weights,
        "K_INNER": k_inner,
        **tile.blocks,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return contiguous tensors with the same values."""
    return [None if t is None else t.contiguous() for t in tensors]


def alike(weights: list[Tensor]) -> list[Tensor]:
    """Return the weights with equal strides; if their strides differ, copy them to contiguous tensors."""
    if len(weights) == 1 or all(w.stride() == weights[0].stride() for w in weights):
        return weights
    return [w.contiguous() for w in weights]
