"""The grouped products as a real layer launches them, with every tile of the table, for `build`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget

from benchmarks.compile_table.variants import ACCUMULATORS, Variant, variant
from fairseq_tutel.kernels import triton_gemm, triton_hidden, triton_tiles, triton_up, triton_weight_grad
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.tiles import Tile, rows_of
from fairseq_tutel.kernels.triton_launch import DESCRIPTORS, hardware_class

# tf32 is fp32 with torch's switch on, tf32x3 is fp32 with --moe-fp32-products tf32x3.
PRECISIONS = {"fp32": "ieee", "tf32": "tf32", "tf32x3": "tf32x3", "fp16": "half", "bf16": "half"}

# Epilogues differ by a few instructions an element: everywhere the plainest and the one with two maps,
# and all of them once, where compiling is quickest.
EVERYWHERE = ("relu", "swiglu")
ALL_ON, ALL_IN = "gfx942", "bf16"


def hardware_of_target(target: GPUTarget) -> str:
    """Return the hardware class that `tiles` has for a target."""
    return "amd" if target.backend == "hip" else hardware_class(target.arch // 10)


def product_variants(target: GPUTarget) -> Iterator[Variant]:
    """Yield the row tiles and every product, in every dtype but fp64, which is for the interpreter."""
    yield variant(
        "row_tiles/i64",
        triton_tiles._row_tiles_kernel,
        {"counts": "i64", "tiles": "i64"},
        ("num_rows", "num_experts"),
        {
            "SMALLEST": triton_tiles.BLOCKS_M[0],
            "BLOCK_E": triton_tiles.BLOCK_EXPERTS,
            "BLOCK_T": triton_tiles.BLOCK_TILES,
        },
    )
    for precision in PRECISIONS:
        if precision.startswith("tf32") and target.backend == "hip":
            continue
        is_all = target.arch == ALL_ON and precision == ALL_IN
        for activation in (*ACTIVATIONS, "swiglu") if is_all else EVERYWHERE:
            prefix = {"swiglu": "glu_", "relu": "relu_"}.get(activation, "")
            for reading in _readings(target, f"{prefix}up", precision):
                yield _up(reading, activation)
            for reading in _readings(target, f"{prefix}hidden", precision):
                yield _hidden(target, reading, activation)
        for kind in ("linear", "dx", "glu_dx"):
            for reading in _readings(target, kind, precision):
                yield _linear(kind, reading)
        for reading in _readings(target, "weight", precision):
            yield _weight_grad(reading, gated=True)
            yield _weight_grad(reading, gated=False)


@dataclass(frozen=True)
class _Reading:
    """How a kernel reads: the arguments of `_product` in addition to its own."""

    precision: str
    tile: Tile
    has_tma: bool
    suffix: str  # of the kernel's name: empty for the tile of small shapes, otherwise the tile

    @property
    def dtype(self) -> str:
        return "fp32" if self.precision.startswith("tf32") else self.precision

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "PRECISION": self.precision if self.precision.startswith("tf32") else "ieee",
            "ACC": ACCUMULATORS[self.dtype],
        }


def _readings(target: GPUTarget, kind: str, precision: str) -> list[_Reading]:
    """Return a reading for every tile that a product may have on a target."""
    hardware = hardware_of_target(target)
    *large, small = (row.tile for row in rows_of(kind, hardware, PRECISIONS[precision]))
    has_tma = hardware in DESCRIPTORS
    return [
        *(_Reading(precision, t, has_tma, f"/{t.block_m}x{t.block_n}x{t.stages}") for t in large),
        _Reading(precision, small, has_tma, ""),
    ]


def _up(reading: _Reading, activation: str) -> Variant:
    glu = activation == "swiglu"
    kept: tuple[str, ...] = ("h_out", "g_out", "gate_bias") if glu else ("h_out",)
    if not glu and ACTIVATIONS[activation].keeps_output:
        kept = ()
    pointers = dict.fromkeys(("x", "bias", "a_out", *kept), reading.dtype)
    absent = {"gate_weight", "gate_bias", "h_out", "g_out"} - {*kept, "gate_weight" if glu else ""}
    return _product(
        f"ffn_up/{reading.precision}/{activation}{reading.suffix}",
        triton_up._up_kernel,
        pointers | {"index": "i64", "tiles": "i64"},
        ("start", "tiles_m", "N", "K"),
        {"ACTIVATION": "swish" if glu else activation} | dict.fromkeys(absent),
        ("weight", "gate_weight") if glu else ("weight",),
        True,
        reading,
    )


def _hidden(target: GPUTarget, reading: _Reading, activation: str) -> Variant:
    """With gates and biases; the activation is computed again unless it is saved."""
    glu = activation == "swiglu"
    given: tuple[str, ...] = ("h_in", "g_in", "dg_out", "a_out") if glu else ("h_in", "a_out")
    if not glu and ACTIVATIONS[activation].keeps_output:
        given = ("a_in", "a_out")
    absent = {"a_in", "h_in", "g_in", "dg_out", "a_out"} - set(given)
    pointers = dict.fromkeys(("dy", "bias", "dh_out", *given), reading.dtype)
    return _product(
        f"ffn_down_backward/{reading.precision}/{activation}{reading.suffix}",
        triton_hidden._hidden_kernel,
        pointers | {"index": "i64", "gate": "fp32", "parts": "fp32", "tiles": "i64"},
        ("start", "tiles_m", "num_rows", "N", "K"),
        {"ACTIVATION": "swish" if glu else activation, "IS_CUDA": target.backend == "cuda"}
        | dict.fromkeys(absent),
        ("weight",),
        False,
        reading,
    )


def _linear(kind: str, reading: _Reading) -> Variant:
    """As the down-projection, with a bias, or as the gradient of rows that went through one or two maps."""
    dtype, tile, two = reading.dtype, reading.tile, kind == "glu_dx"
    name = f"grouped_linear/{reading.precision}/bias"
    absent = ["more", "more_weight"]
    if kind != "linear":
        name = f"ffn_up_backward/{reading.precision}/{'glu' if two else 'one'}"
        absent = ["bias"] if two else ["bias", "more", "more_weight"]
    rows = ("rows", "more") if two else ("rows",)
    result = _product(
        name + reading.suffix,
        triton_gemm._linear_kernel,
        dict.fromkeys(("out", *rows) if "bias" in absent else ("out", "bias", *rows), dtype)
        | {"tiles": "i64"},
        ("start", "tiles_m", "N", "K"),
        dict.fromkeys(absent),
        ("weight", "more_weight") if two else ("weight",),
        kind == "linear",
        reading,
    )
    if reading.has_tma:
        block = f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>"
        result.signature.update(dict.fromkeys(rows, block))
        result.constants["ROWS_DESCRIPTOR"] = True
    return result


def _weight_grad(reading: _Reading, gated: bool) -> Variant:
    """As fc2's, with gathered gradients of the output and gates, or as fc1's, with gathered tokens."""
    tile = reading.tile
    pointers = dict.fromkeys(("dout", "rows", "dweight", "dbias"), reading.dtype)
    pointers |= dict.fromkeys(("dout_index" if gated else "rows_index", "starts"), "i64")
    if gated:
        pointers["bias_scale"] = "fp32"
    absent = ("rows_index",) if gated else ("dout_index", "bias_scale")
    return variant(
        f"grouped_weight_grad/{reading.precision}/{'fc2' if gated else 'fc1'}{reading.suffix}",
        triton_weight_grad._weight_grad_kernel,
        pointers,
        ("OUT", "IN"),
        {
            **dict.fromkeys(absent),
            "BLOCK_O": tile.block_m,
            "BLOCK_I": tile.block_n,
            "BLOCK_R": tile.block_k,
            "GROUP": tile.group,
            **reading.constants,
        },
        tile,
    )


def _product(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    integers: tuple[str, ...],
    constants: dict[str, Any],
    weights: tuple[str, ...],
    k_inner: bool,
    reading: _Reading,
) -> Variant:
    """Add what all products over row tiles share: the weights, their strides and the tiles."""
    tile, dtype = reading.tile, reading.dtype
    result = variant(
        name,
        kernel,
        pointers | dict.fromkeys(weights, dtype),
        (*integers, "stride_e", "stride_n" if k_inner else "stride_k"),
        {
            "stride_k" if k_inner else "stride_n": 1,
            "ROWS_DESCRIPTOR": False,
            "WEIGHT_DESCRIPTOR": reading.has_tma,
            "K_INNER": k_inner,
            **tile.blocks,
            **reading.constants,
            **constants,
        },
        tile,
    )
    if reading.has_tma:
        block = (tile.block_n, tile.block_k) if k_inner else (tile.block_k, tile.block_n)
        described = f"tensordesc<{dtype}[1, {block[0]}, {block[1]}]>"
        result.signature.update(dict.fromkeys(weights, described))
    return result
