"""Compiles the grouped products for every target, and reads their resources and main loops."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from triton.backends.compiler import GPUTarget

from benchmarks.compile_table import build
from benchmarks.compile_table.products import EVERYWHERE, product_variants
from benchmarks.static.loops import main_loop
from fairseq_tutel.kernels.activations import ACTIVATIONS

# bf16 is the dtype of training on these GPUs; fp16 differs by a letter of an instruction.
PRECISION = "bf16"


@dataclass(frozen=True)
class Processor:
    """The limits of one processor: a streaming multiprocessor (NVIDIA) or a compute unit (AMD).

    Attributes:
        shared: bytes of shared memory.
        reserved: bytes of shared memory that the driver takes for each program.
        registers: registers of 32 bits, of all lanes.
        granularity: a warp gets a multiple of this number of registers per lane.
        lanes: lanes of a warp.
        warps: the largest number of resident warps.

    Source: CUDA C++ programming guide, table of compute capabilities; AMD CDNA 3 and 4 ISA manuals.
    """

    shared: int
    reserved: int
    registers: int
    granularity: int
    lanes: int
    warps: int

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """Return how many programs with these resources are resident at the same time."""
        by_warp = -(-registers // self.granularity) * self.granularity * self.lanes
        limits = [self.warps // warps, self.registers // by_warp // warps]
        if shared:
            limits.append(self.shared // (shared + self.reserved))
        return min(limits)


_KIB = 1024
PROCESSORS = {
    "sm_80": Processor(164 * _KIB, _KIB, 65536, 8, 32, 64),
    "sm_90": Processor(228 * _KIB, _KIB, 65536, 8, 32, 64),
    "sm_100": Processor(228 * _KIB, _KIB, 65536, 8, 32, 64),
    "sm_120": Processor(100 * _KIB, _KIB, 65536, 8, 32, 48),
    # Four SIMD units, each with 512 registers per lane and at most eight waves.
    "gfx942": Processor(64 * _KIB, 0, 4 * 512 * 64, 8, 64, 32),
    "gfx950": Processor(160 * _KIB, 0, 4 * 512 * 64, 8, 64, 32),
}


def targets() -> dict[str, GPUTarget]:
    """Return the targets of PROCESSORS by name."""
    return {name: t for t in build.TARGETS if (name := build.name_of(t)) in PROCESSORS}


def rows(names: Sequence[str], only: str) -> Iterator[dict[str, Any]]:
    """Compile the products whose name contains `only`, and yield a row per kernel and target."""
    for name, target in targets().items():
        if name in names:
            for variant in product_variants(target):
                _, precision, *rest = variant.name.split("/")
                is_other = not set(rest).isdisjoint({*ACTIVATIONS} - {*EVERYWHERE})
                if precision == PRECISION and only in variant.name and not is_other:
                    yield row(variant, name, target)


def row(variant: Any, name: str, target: GPUTarget) -> dict[str, Any]:
    """Compile one kernel for one target and return its resources and main loop."""
    try:
        compiled = build.build(variant, target)
    except RuntimeError as error:  # the compiler of an older Triton may not support the target
        reason = str(error).splitlines()[0]
        return {"kernel": variant.name, "target": name, "status": "failed", "reason": reason}
    f, loop = build.figures(compiled), main_loop(compiled)
    warps = compiled.metadata.num_warps
    return {
        "kernel": variant.name,
        "target": name,
        "status": "ok",
        **asdict(f),
        "programs": PROCESSORS[name].programs(f.registers, f.shared, warps),
        **({} if loop is None else {**asdict(loop), "other_per_mma": round(loop.ratio, 2)}),
    }
