"""Ways to compute one MoE layer, a file each, and the dense layer that they are compared with.

A builder takes (case, inputs) and returns a `Variant`; it raises `Unsupported` where it cannot compute
the case, and ImportError where its package is not installed.
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
# Packages of others, where they are installed; their errors are not our failure.
PACKAGES: dict[str, Builder] = {
    "tutel": tutel.build,
    "scattermoe": scattermoe.build,
    "liger_kernel": liger_kernel.build,
    "megablocks": megablocks.build,
}
BUILDERS = OWN | PACKAGES
