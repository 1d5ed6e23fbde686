"""`python -m benchmarks.compiled`: print registers, spills and shared memory of Triton kernels.

The benchmark needs no GPU. One layer runs forward and backward on meta tensors. The launches that a GPU of
each target would receive are recorded, and compiled with every tile of the table. The benchmark also counts
launches, host reads and bytes of one layer.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

import fairseq_tutel as ft
from benchmarks import command
from benchmarks.layer_cases import CUDA_CASES, Case
from benchmarks.machine import facts
from benchmarks.output import BadOption, Report, Row
from fairseq_tutel import kernels
from fairseq_tutel.kernels import gate_product, tiles, triton_launch, triton_ops
from fairseq_tutel.kernels.triton_launch import hardware_class
from fairseq_tutel.kernels.triton_tiles import row_tiles

TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942", "gfx950")},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32x3": torch.float32}
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "i1",
}  # fmt: skip
ACTIVATIONS = ("relu", "swiglu")  # kernels of other activations have similar epilogues
MOST_TILES = 4  # maximum number of tiles for one kind of product, hardware and precision
# Operations that allocate a tensor or change only its shape. Views are recognized by their schema.
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "detach",
        "lift_fresh", "_reshape_alias")  # fmt: skip
READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "repeat_interleave")


def main(words: list[str] | None = None) -> int:
    """Compile the kernels and print their resources."""
    parser = command.parser_of("compiled", "Compile every kernel for GPUs that are not here.")
    add = parser.add_argument
    add("--targets", default="sm_80,sm_90,gfx942", help=f"of {', '.join(TARGETS)}")
    add("--dtypes", default="bf16", help=f"of {', '.join(DTYPES)}")
    add("--only", default="", help="a part of the kernel's name")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    for flag, table in (("targets", TARGETS), ("dtypes", DTYPES)):
        for name in getattr(options, flag).split(","):
            if name not in table:
                raise BadOption(f"--{flag} has {name!r}; choose from {', '.join(table)}.")
    if options.quick:
        options.targets, options.only = "gfx942", "row_tiles"
    machine = facts(torch.device("cpu"), torch.bfloat16)
    report = Report("compiled", "", machine, command.shown(options), options.json)
    for target in options.targets.split(","):
        found = [launch for dtype in options.dtypes.split(",") for launch in launches_of(target, dtype)]
        if rows := [_row(launch, target) for launch in found if options.only in launch.name]:
            report.add(target, {}, rows)
    for name in ("C", "E"):
        report.add(f"layer {name}", {}, _phases(name))
    report.finish()
    return 0


@dataclass(frozen=True)
class Launch:
    """One specialization of a kernel: the types of its arguments, its constants and launch options."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, int]

    def build(self, target: str) -> Any:
        """Return the compiled kernel; the last entry of its `asm`, "cubin" or "hsaco", is the binary."""
        places = {
            (self.kernel.arg_names.index(name),): [("tt.divisibility", 16)] for name in self.divisible
        }
        source = ASTSource(self.kernel, self.signature, self.constants, places)
        return triton.compile(source, target=TARGETS[target], options=self.options)


@dataclass
class Trace:
    """The kernel launches of a function, in order.

    Attributes:
        names: the name of each launched Triton function or torch operation.
        bytes: bytes moved if every tensor argument is read once and every result is written once.
        reads: the torch operations that make the host wait for the device.
        kernels: the specializations of the Triton functions.
    """

    names: list[str] = field(default_factory=list)
    bytes: int = 0
    reads: list[str] = field(default_factory=list)
    kernels: list[Launch] = field(default_factory=list)

    def add(self, name: str, values: Any) -> None:
        """Record a launch with its arguments and results."""
        values = [getattr(value, "base", value) for value in tree_leaves(values)]  # descriptor -> tensor
        self.names.append(name)
        self.bytes += sum(
            _bytes_of(t) for t in {id(v): v for v in values if isinstance(v, Tensor)}.values()
        )


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; a dimension of stride 0 counts as one element."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= 1 if stride == 0 and size else size
    return elements * tensor.element_size()


class _Operations(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if name in READS:
            self.trace.reads.append(name)
        elif not op.is_view and name not in FREE and isinstance(result, Tensor | tuple | list):
            self.trace.add(name, (args, kwargs, result))
        return result


@contextmanager
def recorded(target: str = "sm_90", precision: str = "bf16", tile: int | None = None) -> Iterator[Trace]:
    """Record the launches of the block, in which meta tensors count as tensors on a GPU.

    Args:
        target: the GPU; all choices that depend on the hardware are made for this GPU.
        precision: precision of the matrix products; a part of the kernels' names.
        tile: row of the tile table for all products; None selects the row by the shape of each product.
    """
    trace, is_amd = Trace(), TARGETS[target].backend == "hip"
    hardware = "amd" if is_amd else hardware_class(TARGETS[target].arch // 10)

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        trace.add(kernel.fn.__name__, args)
        # The arguments are not stored, because autograd copies a gradient that has another reference.
        trace.kernels.append(_specialized(precision, kernel, args, kwargs))

    def choose(kind: str, hardware: str, precision: str, *_: int) -> tiles.Tile:
        rows = tiles.rows_of(kind, hardware, precision)
        return rows[min(tile or 0, len(rows) - 1)].tile

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(triton.runtime.JITFunction, "run", launch))
        enter(mock.patch.object(triton_launch, "hardware_of", lambda device: hardware))
        enter(mock.patch.object(torch.version, "hip", "6" if is_amd else None))
        if tile is not None:
            enter(mock.patch.object(triton_launch, "choose", choose))
        enter(mock.patch.object(torch, "is_autocast_enabled", lambda *_: False))
        is_supported = lambda x, _: not is_amd and x.dtype == torch.bfloat16  # noqa: E731
        enter(mock.patch.object(gate_product, "is_supported", is_supported))
        by_name = {"tf32x3": triton_ops.IN_TF32X3}
        enter(mock.patch.object(kernels, "ops", lambda *a: by_name.get(a[-1], triton_ops.BY_PRODUCTS)))
        enter(_Operations(trace))
        yield trace


def launches_of(target: str, precision: str) -> list[Launch]:
    """Return every specialization that layers of a dtype launch on a target, with every tile."""
    found = {launch.name: launch for launch in _exchanged(target, precision).kernels}
    for activation in ACTIVATIONS:
        case = replace(CUDA_CASES["A"], activation=activation, top_k=2)
        for tile in range(MOST_TILES):
            for loss, bias in (("gshard", activation == "relu"), ("none", False)):
                for trace in trained(case, loss, bias, precision, target, tile):
                    found |= {launch.name: launch for launch in trace.kernels}
    return sorted(found.values(), key=lambda launch: launch.name)


def _specialized(label: str, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Return Triton's specialization of a launch: arguments that are None, constexpr or 1 are constants."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, divisible = {}, {}, []
    for parameter in kernel.params:
        name, value = parameter.name, given.get(parameter.name)
        is_special = not parameter.do_not_specialize
        if isinstance(value, TensorDescriptor):
            block = ", ".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}[{block}]>"
        elif isinstance(value, Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            divisible.append(name)
        elif parameter.is_constexpr or value is None or (is_special and value == 1):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if is_special and value % 16 == 0:
                divisible.append(name)
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    sizes = [constants[name] for name in constants if name.startswith("BLOCK")]
    described = [name for name, kind in signature.items() if kind.startswith("tensordesc")]
    absent = [name for name, value in constants.items() if value is None]
    parts = [kernel.fn.__name__.strip("_").removesuffix("_kernel"), label, "x".join(map(str, sizes))]
    parts += [f"{options['num_stages']} stages"] if "num_stages" in options else []
    parts += [f"{key} {constants[key]}" for key in ("ACTIVATION", "K_INNER") if key in constants]
    parts += [f"without {' '.join(absent)}"] if absent else []
    parts += [f"described {' '.join(described)}"] if described else []
    return Launch(", ".join(filter(None, parts)), kernel, signature, constants, tuple(divisible), options)


def _exchanged(target: str, precision: str) -> Trace:
    """Return the trace of the kernels that run only if a layer's experts are on several ranks."""
    x_TD = torch.empty(4096, 1024, dtype=DTYPES[precision], device="meta")
    row_of_TK = torch.empty(4096, 2, dtype=torch.int64, device="meta")
    ops = triton_ops.BY_PRODUCTS
    with recorded(target, precision) as trace:
        ops.gather_rows(x_TD, row_of_TK.flatten(), None)
        ops.gather_dot(x_TD, row_of_TK, x_TD)
        row_tiles(row_of_TK[0], len(x_TD))
    return trace


def _row(launch: Launch, target: str) -> Row:
    """Compile one kernel and return its registers, spills and shared memory."""
    found = figures(launch.build(target))
    note = f"{found['registers']} registers, {found['spilled']} spilled, {found['shared']} B shared"
    return {"variant": launch.name, "status": "ok", **found, "note": note}


def figures(compiled: Any) -> dict[str, int]:
    """Return registers, spills and shared memory of a compiled kernel, read from its code.

    Returns:
        registers: number of vector registers per thread.
        spilled: on CUDA the bytes of stack per thread, on AMD the number of spilled registers.
        shared: bytes of shared memory per program.
    """
    shared = compiled.metadata.shared
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        read = lambda name: int(re.findall(rf"\.{name}: *(\d+)", text)[-1])  # noqa: E731
        spilled = read("vgpr_spill_count") + read("sgpr_spill_count")
        return {"registers": read("vgpr_count"), "spilled": spilled, "shared": shared}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        words = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    # No kernel has a local array, so the stack contains only spilled registers.
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    spilled = usage["STACK"] + usage["LOCAL"]
    return {"registers": usage["REG"], "spilled": spilled, "shared": shared}


def _phases(name: str) -> list[Row]:
    """Return the launches, host reads and bytes of a layer in training, and in decoding of 32 sentences."""
    case = CUDA_CASES[name]
    found = dict(zip(("forward", "backward"), trained(case), strict=True))
    found["decoding"] = decoded(replace(case, tokens=32))
    return [
        {
            "variant": phase,
            "status": "ok",
            "launches": len(trace.names),
            "reads": len(trace.reads),
            "bytes": trace.bytes,
            "note": f"{len(trace.names)} launches, {len(trace.reads)} reads, {trace.bytes / 1e9:.2f} GB",
        }
        for phase, trace in found.items()
    ]


def trained(
    case: Case,
    loss: str = "gshard",
    bias: bool = False,
    precision: str = "bf16",
    target: str = "sm_90",
    tile: int | None = None,
) -> tuple[Trace, Trace]:
    """Return the traces of the forward and the backward pass of a layer in training."""
    dtype, layer = DTYPES[precision], _layer(case, loss, bias, precision)
    x_TD = torch.empty(case.tokens, case.model_dim, dtype=dtype, device="meta", requires_grad=True)
    with recorded(target, precision, tile) as forward:
        y_TD, output = layer(x_TD)
    ends = [y_TD] if loss == "none" else [y_TD, output.balance_loss]
    gradients = [torch.empty_like(end) for end in ends]
    with recorded(target, precision, tile) as backward:
        torch.autograd.backward(ends, gradients)
    return forward, backward


@torch.no_grad()
def decoded(case: Case) -> Trace:
    """Return the trace of one decoding step in bf16."""
    layer = _layer(case, "none", False, "bf16").eval()
    x_TD = torch.empty(case.tokens, case.model_dim, dtype=torch.bfloat16, device="meta")
    with recorded() as trace:
        layer(x_TD)
    return trace


def _layer(case: Case, loss: str, bias: bool, precision: str) -> ft.MoELayer:
    config = ft.MoEConfig(
        case.model_dim,
        case.hidden_dim,
        case.num_experts,
        top_k=case.top_k,
        activation="relu" if case.is_glu else case.activation,
        expert_type="glu" if case.is_glu else "ffn",
        expert_bias=bias,
        balance_loss=loss,
        fp32_products="tf32x3" if precision == "tf32x3" else "torch",
    )
    with torch.device("meta"):
        return ft.MoELayer(config, seed=1).to(DTYPES[precision])


if __name__ == "__main__":
    sys.exit(main())
