"""The grouped products as a real layer launches them, for `build`: default tiles, aligned dimensions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget

from benchmarks.compile_table.variants import ACCUMULATORS, Variant, variant
from fairseq_tutel.kernels import triton_gemm, triton_hidden, triton_tiles, triton_up, triton_weight_grad
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.kernels.tiles_config import Config, candidates

# A layer with full tiles: rows of all experts, experts, H or I, D or O.
SHAPE = (65536, 8, 8192, 2048)

# tf32 is fp32 with torch's switch on, tf32x3 is fp32 with --moe-fp32-products tf32x3.
PRECISIONS = {"fp32": "ieee", "tf32": "tf32", "tf32x3": "tf32x3", "fp16": "half", "bf16": "half"}

# Epilogues differ by a few instructions an element: everywhere the plainest and the one with two maps,
# and all of them once, where compiling is quickest.
EVERYWHERE = ("relu", "swiglu")
ALL_ON, ALL_IN = "gfx942", "bf16"


def hardware_of_target(target: GPUTarget) -> str:
    """Return the class of tile sizes that `tiles_config` has for a target."""
    if target.backend == "hip":
        return "amd"
    return "hopper" if target.arch >= 90 else "ampere"


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
            yield _up(target, precision, activation)
            yield _hidden(target, precision, activation)
        yield _linear(target, precision, more=False)
        yield _linear(target, precision, more=True)
        yield _weight_grad(target, precision, gated=True)
        yield _weight_grad(target, precision, gated=False)


@dataclass(frozen=True)
class _Reading:
    """How a kernel reads: the arguments of `_product` in addition to its own."""

    precision: str
    config: Config
    has_tma: bool

    @property
    def dtype(self) -> str:
        return "fp32" if self.precision.startswith("tf32") else self.precision

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "PRECISION": self.precision if self.precision.startswith("tf32") else "ieee",
            "ACC": ACCUMULATORS[self.dtype],
        }


def _reading(target: GPUTarget, kind: str, precision: str) -> _Reading:
    hardware = hardware_of_target(target)
    config = candidates(kind, hardware, PRECISIONS[precision], *SHAPE)[0]
    return _Reading(precision, config, hardware == "hopper")


def _up(target: GPUTarget, precision: str, activation: str) -> Variant:
    glu = activation == "swiglu"
    reading = _reading(target, "glu_up" if glu else "up", precision)
    kept: tuple[str, ...] = ("h_out", "g_out", "gate_bias") if glu else ("h_out",)
    if not glu and ACTIVATIONS[activation].keeps_output:
        kept = ()
    pointers = dict.fromkeys(("x", "bias", "a_out", *kept), reading.dtype)
    absent = {"gate_weight", "gate_bias", "h_out", "g_out"} - {*kept, "gate_weight" if glu else ""}
    return _product(
        f"ffn_up/{precision}/{activation}",
        triton_up._up_kernel,
        pointers | {"index": "i64", "tiles": "i64"},
        ("start", "tiles_m", "N", "K"),
        {"ACTIVATION": "swish" if glu else activation} | dict.fromkeys(absent),
        ("weight", "gate_weight") if glu else ("weight",),
        True,
        reading,
    )


def _hidden(target: GPUTarget, precision: str, activation: str) -> Variant:
    """With gates and biases; the activation is computed again unless it is saved."""
    glu = activation == "swiglu"
    reading = _reading(target, "glu_hidden" if glu else "hidden", precision)
    given: tuple[str, ...] = ("h_in", "g_in", "dg_out", "a_out") if glu else ("h_in", "a_out")
    if not glu and ACTIVATIONS[activation].keeps_output:
        given = ("a_in", "a_out")
    absent = {"a_in", "h_in", "g_in", "dg_out", "a_out"} - set(given)
    pointers = dict.fromkeys(("dy", "bias", "dh_out", *given), reading.dtype)
    return _product(
        f"ffn_down_backward/{precision}/{activation}",
        triton_hidden._hidden_kernel,
        pointers | {"index": "i64", "gate": "fp32", "parts": "fp32", "tiles": "i64"},
        ("start", "tiles_m", "num_rows", "N", "K"),
        {"ACTIVATION": "swish" if glu else activation, "IS_CUDA": target.backend == "cuda"}
        | dict.fromkeys(absent),
        ("weight",),
        False,
        reading,
    )


def _linear(target: GPUTarget, precision: str, more: bool) -> Variant:
    """As the down-projection, with a bias, or as the gradient of rows that went through two maps."""
    reading = _reading(target, "glu_dx" if more else "linear", precision)
    dtype, config = reading.dtype, reading.config
    rows = ("rows", "more") if more else ("rows",)
    result = _product(
        f"ffn_up_backward/{precision}/glu" if more else f"grouped_linear/{precision}/bias",
        triton_gemm._linear_kernel,
        dict.fromkeys(("out", *rows) if more else ("out", "bias", *rows), dtype) | {"tiles": "i64"},
        ("start", "tiles_m", "N", "K"),
        dict.fromkeys(("bias",) if more else ("more", "more_weight")),
        ("weight", "more_weight") if more else ("weight",),
        not more,
        reading,
    )
    if reading.has_tma:
        block = f"tensordesc<{dtype}[{config.block_m}, {config.block_k}]>"
        result.signature.update(dict.fromkeys(rows, block))
        result.constants["ROWS_DESCRIPTOR"] = True
    return result


def _weight_grad(target: GPUTarget, precision: str, gated: bool) -> Variant:
    """As fc2's, with gathered gradients of the output and gates, or as fc1's, with gathered tokens."""
    reading = _reading(target, "weight", precision)
    config = reading.config
    pointers = dict.fromkeys(("dout", "rows", "dweight", "dbias"), reading.dtype)
    pointers |= dict.fromkeys(("dout_index" if gated else "rows_index", "starts"), "i64")
    if gated:
        pointers["bias_scale"] = "fp32"
    absent = ("rows_index",) if gated else ("dout_index", "bias_scale")
    return variant(
        f"grouped_weight_grad/{precision}/{'fc2' if gated else 'fc1'}",
        triton_weight_grad._weight_grad_kernel,
        pointers,
        ("OUT", "IN"),
        {
            **dict.fromkeys(absent),
            "BLOCK_O": config.block_m,
            "BLOCK_I": config.block_n,
            "BLOCK_R": config.block_k,
            "GROUP": config.group,
            **reading.constants,
        },
        config,
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
    config, dtype = reading.config, reading.dtype
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
            **config.blocks,
            **reading.constants,
            **constants,
        },
        config,
    )
    if reading.has_tma:
        block = (config.block_n, config.block_k) if k_inner else (config.block_k, config.block_n)
        described = f"tensordesc<{dtype}[1, {block[0]}, {block[1]}]>"
        result.signature.update(dict.fromkeys(weights, described))
    return result
