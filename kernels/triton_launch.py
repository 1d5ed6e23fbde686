"""Launches Triton kernels, and selects their tile sizes, precision and use of tensor descriptors (TMA)."""

import functools
import itertools
import threading
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fairseq_tutel.kernels import interpreted
from fairseq_tutel.kernels.tiles import Tile, cdiv, choose, num_tiles, table_start

DESCRIPTORS = ("sm_90", "sm_100", "sm_120")  # hardware with TMA
ALIGNMENT = 16  # bytes; TMA requires it for a tensor's address and all strides except the innermost
IS_HIP = torch.version.hip is not None


# Each thread's cache of compiled kernels. A key has all properties for which Triton compiles a kernel anew.
_COMPILED = threading.local()
# The ID of each combination of a kernel, its constants, and the properties of its integer arguments.
_NUMBERS: dict[tuple[Any, ...], int] = {}
_COUNTER = itertools.count()


class Plan:
    """A launch's kernel, grid and arguments except tensors. Callers cache plans by sizes and dtypes.

    Args:
        kernel: a function decorated with triton.jit.
        grid: the number of programs in one to three dimensions.
        numbers: the kernel's integer arguments, which follow its tensors.
        constants: compile-time constants and Triton's options, such as num_warps, in the same order in all
            plans of a kernel.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[int, ...], constants: dict[str, Any]
    ) -> None:
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.grid = (*grid, 1, 1)[:3]
        self.rest = *numbers, *(constants[name] for name in kernel.arg_names if name in constants)
        # Triton compiles special kernels for 1, for multiples of 16, and for numbers of more than 32 bits.
        kinds = ((n == 1, n >> 31, n % ALIGNMENT == 0) for n in numbers)
        self.key = _NUMBERS.setdefault((kernel.fn, *constants.values(), *kinds), next(_COUNTER))


def launch(plan: Plan, device: torch.device, *tensors: Any) -> None:
    """Launch a Triton kernel on the current stream of a device; all kernels are launched by this function.

    Triton takes several times as long to find a compiled kernel as to launch it. Therefore the first launch
    caches the compiled kernel by all properties for which Triton specializes kernels.

    Args:
        plan: the kernel, its grid and its other arguments.
        device: the device of the tensors.
        tensors: tensors, tensor descriptors or None, in the kernel's order.
    """
    if not is_direct(device):
        plan.kernel[plan.grid](*tensors, *plan.numbers, **plan.constants)
        return
    active, index = driver.active, device.index
    if index != active.get_current_device():
        with torch.cuda.device(index):
            launch(plan, device, *tensors)
        return
    cache: dict[Any, Any] = vars(_COMPILED)
    key: list[Any] = [plan.key, index]
    add = key.append
    for tensor in tensors:
        if tensor is None:
            add(None)
        elif type(tensor) is TensorDescriptor:
            key += tensor.base.dtype, *tensor.block_shape
        else:
            add(tensor.dtype)
            add(tensor.data_ptr() % ALIGNMENT)
            if IS_HIP:
                add(tensor.untyped_storage().nbytes() < 2**31)
    found = cache.get(tuple(key))
    if found is None:
        # A launch with tensor descriptors needs a CUDA context, which a new thread lacks. Creating a tensor
        # binds a context to the thread; torch.cuda.stream, or set_device to the current device, does not.
        torch.zeros(1, device=device)
        compiled = plan.kernel[plan.grid](*tensors, *plan.numbers, **plan.constants)
        fixed = compiled.function, compiled.packed_metadata, None, None, None
        cache[tuple(key)] = compiled, compiled.run, fixed
        return
    compiled, run, fixed = found
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler has set hooks
        compiled[plan.grid](*tensors, *plan.rest)
    else:  # The metadata for hooks is left out, because it would double the time of a launch.
        run(*plan.grid, active.get_current_stream(index), *fixed, *tensors, *plan.rest)


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

    fp32 is "ieee", or "tf32" if torch allows TF32. With `tf32x3`, fp32 is "tf32x3" on an NVIDIA GPU.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return "half"
    if dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    if tf32x3:
        return "tf32x3"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def chosen(
    kind: str, rows: Tensor, num_rows: int, shape: tuple[int, ...], tf32x3: bool = False
) -> tuple[Tile, str]:
    """Return the tile and the kernel's precision of a product with weights of this shape: E, N, K."""
    hardware, precision = hardware_of(rows.device), precision_of(rows.dtype, tf32x3)
    tile = choose(kind, hardware, precision, num_rows, *shape)
    return tile, input_precision_of(hardware, precision, rows.dtype)


def accumulator_of(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which products are summed: fp64 for fp64, otherwise fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def has_descriptors(device: torch.device) -> bool:
    """Return whether kernels on this device can load tiles with tensor descriptors (TMA)."""
    return hardware_of(device) in DESCRIPTORS


def input_precision_of(hardware: str, precision: str, dtype: torch.dtype) -> str:
    """Return the precision constant for the kernels' matrix products. On a GPU, it affects only fp32."""
    if hardware == "interpreted" and dtype == torch.bfloat16:
        return "interpreted"
    return "ieee" if precision == "half" else precision


def described(tensors: list[Tensor], block: tuple[int, ...], is_transposed: bool = False) -> Any:
    """Return TMA descriptors that load tiles of shape `block`; None if a tensor does not support TMA.

    With `is_transposed`, the descriptors exchange the last two dimensions of the tensors.
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
        descriptor = object.__new__(TensorDescriptor)  # skips slow checks
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


class Product(NamedTuple):
    """The properties of a grouped matrix product that determine the grid and arguments of its launch."""

    tile: Tile
    precision: str  # precision of the matrix instructions
    num_rows: int  # rows of the result
    shape: torch.Size  # the shape of the weights: E, N, K
    strides: tuple[int, ...]  # the strides of the weights
    dtype: torch.dtype
    describes_rows: bool  # whether the rows are tensor descriptors
    describes_weights: bool

    def plan(
        self, kernel: Any, more_columns: int = 0, numbers: tuple[int, ...] = (), **constants: Any
    ) -> Plan:
        """Return a kernel's plan: one program per tile, and `more_columns` more programs per row tile."""
        tile, (num_experts, *sizes) = self.tile, self.shape
        columns = cdiv(sizes[0], tile.block_n) + more_columns
        tiles_m = num_tiles(self.num_rows, num_experts, tile.block_m)
        start = table_start(self.num_rows, num_experts, tile.block_m)
        constants |= {
            "PRECISION": self.precision,
            "ACC": accumulator_of(self.dtype),
            "ROWS_DESCRIPTOR": self.describes_rows,
            "WEIGHT_DESCRIPTOR": self.describes_weights,
            "K_INNER": self.strides[2] == 1,
            **tile.blocks,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        return Plan(
            kernel, (tiles_m * columns,), (*numbers, start, tiles_m, *sizes, *self.strides), constants
        )


def operands(
    tile: Tile,
    precision: str,
    num_rows: int,
    rows: list[Tensor],
    weights_ENK: list[Tensor],
    are_gathered: bool = False,
) -> tuple[list[Any], list[Any], Product]:
    """Return the rows and the weights in the form that the kernel reads, and the product's properties.

    The rows are TMA descriptors if all of them support TMA, else tensors. The same holds for the weights.

    Args:
        tile: the tile sizes.
        precision: the precision constant of the kernel.
        num_rows: the number of rows of the result.
        rows: the one or two tensors of rows that the kernel multiplies.
        weights_ENK: the one or two weights of the kernel's products, with equal strides; see `alike`.
        are_gathered: whether the kernel reads the rows through an index map.
    """
    weight, dtype = weights_ENK[0], rows[0].dtype
    shape, strides = weight.shape, weight.stride()
    rows_read = None if are_gathered else described(rows, (tile.block_m, tile.block_k))
    k_inner = strides[2] == 1
    block = (1, tile.block_n, tile.block_k) if k_inner else (1, tile.block_k, tile.block_n)
    weights_read = described(weights_ENK, block, is_transposed=not k_inner)
    are_described = rows_read is not None, weights_read is not None
    product = Product(tile, precision, num_rows, shape, strides, dtype, *are_described)
    return rows_read or rows, weights_read or weights_ENK, product


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return contiguous tensors with the values of the given tensors; None stays None."""
    return [None if t is None else t.contiguous() for t in tensors]


def alike(weights: list[Tensor]) -> list[Tensor]:
    """Return the weights with equal strides; if their strides differ, copy them to contiguous tensors."""
    if len(weights) == 1 or all(w.stride() == weights[0].stride() for w in weights):
        return weights
    return [w.contiguous() for w in weights]
