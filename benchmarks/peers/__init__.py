"""Implementations of one MoE layer, one per file, and the dense layer that is the baseline.

A builder is a function (case, inputs) -> `Variant`. It raises `Unsupported` if the implementation cannot
compute the case, and ImportError if a package is not installed.
"""

from collections.abc import Callable
from functools import partial

from benchmarks.layer_cases import Case
from benchmarks.layer_inputs import Inputs
from benchmarks.peers import (
    dense,
    einsum,
    grouped_mm,
    liger_kernel,
    loop,
    megablocks,
    ours,
    scattermoe,
    tutel,
)
from benchmarks.peers.variant import Variant

Builder = Callable[[Case, Inputs], Variant]

BACKENDS = ("auto", "reference", "triton")
OURS = {f"ours/{name}": partial(ours.build, backend=name) for name in BACKENDS}
OURS["ours/recompute"] = partial(ours.build, backend="auto", recompute=True)
OWN: dict[str, Builder] = {
    "dense": dense.build,
    **OURS,
    "einsum": einsum.build,
    "einsum_drops": einsum.build_with_drops,
    "loop": loop.build,
    "grouped_mm": grouped_mm.build,
}
# Other packages, which may not be installed. Their errors do not change the exit status.
PACKAGES: dict[str, Builder] = {
    "tutel": tutel.build,
    "scattermoe": scattermoe.build,
    "liger_kernel": liger_kernel.build,
    "megablocks": megablocks.build,
}
BUILDERS = OWN | PACKAGES
