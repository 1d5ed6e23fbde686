"""Launches Triton kernels, and selects their tile sizes, precision and use of tensor descriptors (TMA)."""

import functools
import itertools
import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from fairseq_tutel.kernels import interpreted
from fairseq_tutel.kernels.tiles import Tile, cdiv, choose, num_tiles, table_start

logger = logging.getLogger(__name__)

DESCRIPTORS = ("sm_90", "sm_100", "sm_120")  # hardware with TMA
ALIGNMENT = 16  # bytes; TMA requires this alignment of a tensor's address and of all strides but the last
IS_HIP = torch.version.hip is not None


# Each thread's compiled kernels, by all properties of a launch for which Triton compiles separate kernels.
_COMPILED = threading.local()
# The ID of each combination of a kernel, its constants, and the properties of its integer arguments.
_NUMBERS: dict[tuple[Any, ...], int] = {}
_COUNTER = itertools.count()


class Plan:
    """A kernel launch without its tensors. Callers cache a plan for each combination of sizes and dtypes.

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
        # Triton specializes kernels for numbers that are 1, a multiple of 16, or wider than 32 bits.
        kinds = ((n == 1, n >> 31, n % ALIGNMENT == 0) for n in numbers)
        self.key = _NUMBERS.setdefault((kernel.fn, *constants.values(), *kinds), next(_COUNTER))


def launch(plan: Plan, device: torch.device, *tensors: Any) -> None:
    """Launch a Triton kernel on the current stream of a device; all kernels are launched by this function.

    Finding a compiled kernel takes Triton several times as long as launching the kernel. Therefore the
    first launch caches the compiled kernel by all properties for which Triton specializes kernels.

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
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            add(None)
        elif type(tensor) is TensorDescriptor:
            key += tensor.base.dtype, *tensor.block_shape
        else:
            add(tensor.dtype)
            addresses |= tensor.data_ptr()
            if IS_HIP:
                add(tensor.untyped_storage().nbytes() < 2**31)
    if addresses % ALIGNMENT:
        key += [t.data_ptr() % ALIGNMENT for t in tensors if isinstance(t, Tensor)]
    found = cache.get(tuple(key))
    if found is None:
        announce_compilation()
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
def announce_compilation() -> None:
    """Log once per process that the first launches take seconds."""
    logger.info(
        "The first forward and backward passes compile about 15 kernels in about 10 s. Later runs load the "
        "compiled kernels from %s.",
        knobs.cache.dir,
    )


@functools.cache
def is_direct(device: torch.device) -> bool:
    """Return whether `launch` calls compiled kernels without Triton's launcher, as on GPUs."""
    return device.type == "cuda" and not interpreted()


@functools.cache
def hardware_of(device: torch.device) -> str:
    """Return the hardware class of a device: one of `tiles.HARDWARE`, or "interpreted"."""
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
    """Return the precision of a dtype's matrix products: "half" for fp16 and bf16, otherwise "ieee".

    On NVIDIA GPUs, fp32 has precision "tf32x3" if `tf32x3` is set, or else "tf32" if torch allows TF32.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return "half"
    if dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    if tf32x3:
        return "tf32x3"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def chosen(
    kind: str, rows: Tensor, num_rows: int, shape: tuple[int, ...], tf32x3: bool
) -> tuple[Tile, str, str]:
    """Return a product's tile, hardware class and precision. `shape` is the weights' shape (E, N, K)."""
    hardware, precision = hardware_of(rows.device), precision_of(rows.dtype, tf32x3)
    return choose(kind, hardware, precision, num_rows, *shape), hardware, precision


def accumulator_of(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which products are summed: fp64 for fp64, otherwise fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def input_precision_of(hardware: str, precision: str, dtype: torch.dtype) -> str:
    """Return the precision constant of a kernel's products. On a GPU, it affects only fp32 products."""
    if hardware == "interpreted" and dtype == torch.bfloat16:
        return "interpreted"
    return "ieee" if precision == "half" else precision


@dataclass(eq=False)
class Product:
    """The properties of a grouped matrix product that determine the grid and arguments of its launch."""

    tile: Tile
    precision: str  # precision of the matrix instructions
    num_rows: int  # the number of rows of the result
    shape: torch.Size  # the shape of the weights: E, N, K
    strides: tuple[int, ...]  # the strides of the weights
    dtype: torch.dtype
    row_descriptor: dict[str, Any] | None  # see `descriptor`; None: the kernel reads tensors
    weight_descriptor: dict[str, Any] | None

    def plan(
        self, kernel: Any, more_columns: int = 0, numbers: tuple[int, ...] = (), **constants: Any
    ) -> Plan:
        """Return a plan with one program per tile, and `more_columns` additional programs per row tile."""
        tile, (num_experts, *sizes) = self.tile, self.shape
        columns = cdiv(sizes[0], tile.block_n) + more_columns
        tiles_m = num_tiles(self.num_rows, num_experts, tile.block_m)
        start = table_start(self.num_rows, num_experts, tile.block_m)
        constants |= {
            "PRECISION": self.precision,
            "ACC": accumulator_of(self.dtype),
            "ROWS_DESCRIPTOR": self.row_descriptor is not None,
            "WEIGHT_DESCRIPTOR": self.weight_descriptor is not None,
            "K_INNER": self.strides[2] == 1,
            **tile.blocks,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        return Plan(
            kernel, (tiles_m * columns,), (*numbers, start, tiles_m, *sizes, *self.strides), constants
        )


@functools.lru_cache(maxsize=4096)  # equal products are one object, which is the key of cached plans
def product_of(
    tile: Tile,
    hardware: str,
    precision: str,
    num_rows: int,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    rows_shape: tuple[int, ...] | None,
    are_weights_aligned: bool,
) -> Product:
    """Return the properties of a product; see `operands`.

    `rows_shape` is the shape of the rows if their descriptors are allowed, else None.
    """
    rows = weights = None
    if hardware in DESCRIPTORS:
        if rows_shape is not None:
            rows = descriptor(dtype, rows_shape, (rows_shape[1], 1), (tile.block_m, tile.block_k))
        if are_weights_aligned:
            (e, n, k), (by_e, by_n, by_k), blocks = shape, strides, (tile.block_n, tile.block_k)
            if by_k != 1:  # transposed weights
                (n, k), (by_n, by_k), blocks = (k, n), (by_k, by_n), blocks[::-1]
            weights = descriptor(dtype, (e, n, k), (by_e, by_n, by_k), (1, *blocks))
    precision = input_precision_of(hardware, precision, dtype)
    return Product(tile, precision, num_rows, shape, strides, dtype, rows, weights)


@functools.lru_cache(maxsize=1024)
def descriptor(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> dict[str, Any] | None:
    """Return the attributes of the TMA descriptors that load tiles of shape `block` from tensors.

    The result has no tensor. It is None if TMA does not support the tensors' strides.
    """
    if strides[-1] != 1 or 0 in shape:
        return None
    if any(stride * dtype.itemsize % ALIGNMENT for stride in strides[:-1]):
        return None
    like = torch.empty(1, dtype=dtype, device="meta")
    return vars(TensorDescriptor(like, list(shape), list(strides), list(block)))


def operands(
    kind: str,
    num_rows: int,
    rows: list[Tensor],
    weights_ENK: list[Tensor],
    tf32x3: bool = False,
    are_gathered: bool = False,
) -> tuple[list[Any], list[Any], Product]:
    """Return the rows and the weights in the form that the kernel reads, and the product's properties.

    If all tensors of rows support TMA, they are returned as descriptors. The same holds for the weights.

    Args:
        kind: the kind of the product, one of KINDS in tiles; it decides the tile.
        num_rows: the number of rows of the result.
        rows: the one or two contiguous tensors of rows that the kernel multiplies.
        weights_ENK: the one or two weights of the kernel's products; `alike` gives them equal strides.
        tf32x3: whether fp32 products use three TF32 products, on NVIDIA GPUs.
        are_gathered: whether the kernel reads the rows through an index map.
    """
    weight, first = weights_ENK[0], rows[0]
    product = product_of(
        *chosen(kind, first, num_rows, weight.shape, tf32x3), num_rows, weight.shape, weight.stride(),
        first.dtype, None if are_gathered or _misaligned(rows) else first.shape,
        not _misaligned(weights_ENK),
    )  # fmt: skip
    return _read(rows, product.row_descriptor), _read(weights_ENK, product.weight_descriptor), product


def blocks_of(rows: Tensor, hardware: str, block: tuple[int, int]) -> Any:
    """Return a TMA descriptor that loads blocks of half-precision rows; None if TMA cannot load them."""
    attributes = None
    if rows.dtype.itemsize == 2 and hardware in DESCRIPTORS and not _misaligned([rows]):
        attributes = descriptor(rows.dtype, rows.shape, rows.stride(), block)
    return None if attributes is None else _read([rows], attributes)[0]


def _misaligned(tensors: list[Tensor]) -> bool:
    """Return whether the address of one of the tensors (one or two) is misaligned for TMA."""
    return bool((tensors[0].data_ptr() | tensors[-1].data_ptr()) % ALIGNMENT)


def _read(tensors: list[Tensor], attributes: dict[str, Any] | None) -> list[Any]:
    """Return tensor descriptors with these attributes; without attributes, return the tensors."""
    if attributes is None:
        return tensors
    found = []
    for tensor in tensors:
        made = object.__new__(TensorDescriptor)  # skips slow checks
        made.__dict__.update(attributes, base=tensor)
        found.append(made)
    return found


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return contiguous tensors with the values of the given tensors; None stays None."""
    return [None if t is None else t.contiguous() for t in tensors]


def alike(weights: list[Tensor]) -> list[Tensor]:
    """Return the weights with equal strides; if their strides differ, copy them to contiguous tensors."""
    if len(weights) == 1 or all(w.stride() == weights[0].stride() for w in weights):
        return weights
    return [w.contiguous() for w in weights]
