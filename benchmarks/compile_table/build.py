"""Compile every Triton kernel ahead of time, for GPUs that need not be there.

Shows that one source compiles for CUDA and ROCm, and the resources of a kernel that no GPU has run.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.compile_table.products import product_variants
from benchmarks.compile_table.variants import Variant, dispatch_variants, route_variants

TARGETS = (
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("cuda", 120, 32),
    GPUTarget("hip", "gfx90a", 64),
    GPUTarget("hip", "gfx942", 64),
    GPUTarget("hip", "gfx950", 64),
)


@dataclass(frozen=True)
class Figures:
    """The resources of a compiled kernel.

    Attributes:
        registers: vector registers of a thread.
        scalars: scalar registers of a wave, on AMD.
        spilled: on CUDA bytes of stack per thread, on AMD registers; either way 0 is none.
        shared: bytes of shared memory of a program.
    """

    registers: int
    scalars: int
    spilled: int
    shared: int


def variants(target: GPUTarget) -> Iterator[Variant]:
    """Yield every kernel in every dtype, as it is launched on a target."""
    yield from dispatch_variants()
    yield from route_variants()
    yield from product_variants(target)


def build(variant: Variant, target: GPUTarget) -> Any:
    """Return the compiled kernel; its `asm` holds every stage, "cubin" or "hsaco" last."""
    # The order of arguments is the kernel's.
    signature = {name: variant.signature[name] for name in variant.kernel.arg_names}
    source = ASTSource(variant.kernel, signature, variant.constants, variant.attributes)
    return triton.compile(source, target=target, options=variant.options)


def name_of(target: GPUTarget) -> str:
    """Return the target as its vendor's compiler calls it."""
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def figures(compiled: Any) -> Figures:
    """Return the resources of a kernel from `build`, read from the compiled code."""
    if "cubin" in compiled.asm:
        return _cuda_figures(compiled)
    text = compiled.asm["amdgcn"]

    def read(name: str) -> int:
        return int(re.findall(rf"\.{name}: *(\d+)", text)[-1])

    spilled = read("vgpr_spill_count") + read("sgpr_spill_count")
    return Figures(read("vgpr_count"), read("sgpr_count"), spilled, compiled.metadata.shared)


def _cuda_figures(compiled: Any) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    # No kernel has an array of its own, so its stack holds spilled registers alone.
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    spilled = int(usage["STACK"]) + int(usage["LOCAL"])
    return Figures(int(usage["REG"]), 0, spilled, compiled.metadata.shared)
