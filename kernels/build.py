"""Compile every Triton kernel ahead of time, for GPUs that need not be there.

Shows that one source serves CUDA and ROCm, and says what a new kernel costs before it meets a GPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fairseq_tutel.kernels import triton_dispatch
from fairseq_tutel.kernels.build_route import route_variants

TARGETS = (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
DTYPES = ("fp32", "fp16", "bf16", "fp64")


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: the types of its arguments and its compile-time constants."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]


def variants() -> Iterator[Variant]:
    """Yield every kernel in every dtype, with and without its optional argument."""
    for dtype in DTYPES:
        acc = tl.float64 if dtype == "fp64" else tl.float32
        # Gate weights are at least fp32 unless the gate itself is asked to run in half precision.
        weight = "*fp64" if dtype == "fp64" else "*fp32"
        for optional in (False, True):
            yield _variant(
                f"gather_rows/{dtype}/{'scaled' if optional else 'plain'}",
                triton_dispatch._gather_rows_kernel,
                {"x_ptr": dtype, "index_ptr": "i64", "scale_ptr": weight, "rows_ptr": dtype},
                ("model_dim",),
                {"HAS_SCALE": optional, "ACC": acc, "BLOCK_D": 1024},
            )
            yield _variant(
                f"gather_sum/{dtype}/{'weighted' if optional else 'plain'}",
                triton_dispatch._gather_sum_kernel,
                {"rows_ptr": dtype, "row_of_ptr": "i64", "weights_ptr": weight, "y_ptr": dtype},
                ("model_dim", "top_k"),
                {"HAS_WEIGHTS": optional, "ACC": acc, "BLOCK_K": 2, "BLOCK_D": 1024},
            )
        yield _variant(
            f"gather_dot/{dtype}",
            triton_dispatch._gather_dot_kernel,
            {"rows_ptr": dtype, "row_of_ptr": "i64", "y_ptr": dtype, "dots_ptr": dtype},
            ("model_dim", "top_k"),
            {"ACC": acc, "BLOCK_D": 1024},
        )
    yield from (_variant(*arguments) for arguments in route_variants())


def build(variant: Variant, target: GPUTarget) -> Any:
    """Return the compiled kernel; its `asm` holds every stage, "cubin" or "hsaco" last."""
    # The order of arguments is the kernel's.
    signature = {name: variant.signature[name] for name in variant.kernel.arg_names}
    source = ASTSource(variant.kernel, signature, variant.constants)
    return triton.compile(source, target=target)


def build_all(targets: Sequence[GPUTarget] = TARGETS) -> dict[tuple[str, str], Any]:
    """Compile every variant for every target; keys are (variant name, backend)."""
    return {(v.name, t.backend): build(v, t) for t in targets for v in variants()}


def _variant(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    integers: tuple[str, ...],
    constants: dict[str, Any],
) -> Variant:
    signature = {key: f"*{dtype.lstrip('*')}" for key, dtype in pointers.items()}
    signature |= dict.fromkeys(integers, "i32") | dict.fromkeys(constants, "constexpr")
    return Variant(name, kernel, signature, constants)
