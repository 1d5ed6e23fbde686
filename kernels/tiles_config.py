"""Tile sizes of the grouped products: few candidates per kind of product, hardware, dtype and shape.

None was chosen by timing. The first of each list is the default: the largest tile that compiles for its
hardware without spilling a register (`benchmarks.compile_table` prints the figures, a test holds them).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fairseq_tutel.kernels import autotune


@dataclass(frozen=True)
class Config:
    """How one product is cut.

    Attributes:
        block_m: rows of an output tile; for a weight's gradient, its O side.
        block_n: columns of an output tile; for a weight's gradient, its I side.
        block_k: elements summed per step; for a weight's gradient, rows.
        warps: warps of a program.
        stages: steps whose loads are in flight at once.
        group: row tiles that go through all columns together, so that weights are read from L2.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8

    @property
    def blocks(self) -> dict[str, int]:
        """The compile-time constants of a kernel over row tiles."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP": self.group,
        }


# up, glu_up: x @ fc1.T with the activation; linear: one product, or two into one sum; hidden, glu_hidden:
# the gradient of the hidden rows; weight: a weight's gradient.
KINDS = ("up", "glu_up", "linear", "hidden", "glu_hidden", "weight")
HARDWARE = ("hopper", "ampere", "amd")
# half: fp16 and bf16; tf32; ieee: fp32 without tensor cores.
PRECISIONS = ("half", "tf32", "ieee")

# Small, so that edges are met; an interpreted program costs much the same whatever its tile.
INTERPRETED = Config(64, 16, 16, warps=1, stages=1, group=2)

# (hardware, precision) -> kind -> candidates; "" is every kind that has no line of its own.
_TABLE: dict[tuple[str, str], dict[str, tuple[Config, ...]]] = {
    ("hopper", "half"): {
        "": (
            Config(128, 128, 64, 8, 4),
            Config(128, 256, 64, 8, 3),
            Config(128, 128, 64, 8, 3),
            Config(64, 128, 64, 4, 4),
        ),
        "hidden": (
            Config(128, 128, 64, 8, 4),
            Config(128, 128, 64, 8, 3),
            Config(64, 128, 64, 4, 4),
        ),
        "glu_hidden": (
            Config(128, 128, 64, 8, 4),
            Config(128, 64, 64, 8, 4),
            Config(64, 128, 64, 8, 4),
        ),
        # Two sums: as wide as one of 256 columns.
        "glu_up": (
            Config(128, 128, 64, 8, 3),
            Config(128, 64, 64, 8, 4),
            Config(64, 128, 64, 8, 3),
        ),
    },
    ("hopper", "tf32"): {
        "": (Config(128, 128, 32, 8, 4), Config(64, 128, 32, 4, 4)),
        "glu_up": (Config(128, 64, 32, 8, 4), Config(64, 64, 32, 4, 4)),
        "glu_hidden": (Config(128, 64, 32, 8, 4), Config(64, 64, 32, 4, 4)),
    },
    # At most 96 KiB of shared memory, which consumer cards have too.
    ("ampere", "half"): {
        "": (Config(128, 128, 64, 8, 3), Config(128, 128, 32, 8, 4), Config(64, 128, 32, 4, 4)),
        "glu_up": (Config(128, 64, 32, 8, 4), Config(64, 64, 64, 4, 3)),
        "glu_hidden": (Config(128, 64, 32, 8, 4), Config(64, 64, 64, 4, 3)),
    },
    ("ampere", "tf32"): {
        "": (Config(128, 128, 32, 8, 3), Config(64, 128, 32, 4, 3)),
        "glu_up": (Config(128, 64, 32, 8, 3), Config(64, 64, 32, 4, 3)),
        "glu_hidden": (Config(128, 64, 32, 8, 3), Config(64, 64, 32, 4, 3)),
    },
    # 64 KiB of shared memory.
    ("amd", "half"): {
        "": (Config(128, 128, 64, 8, 2), Config(256, 128, 64, 8, 2), Config(64, 128, 64, 4, 2)),
        "glu_up": (Config(128, 128, 32, 8, 2), Config(128, 64, 64, 8, 2)),
        "glu_hidden": (Config(128, 128, 64, 8, 2), Config(128, 64, 64, 8, 2)),
    },
    ("amd", "ieee"): {
        "": (Config(128, 128, 32, 8, 2), Config(64, 64, 32, 4, 2)),
        "glu_up": (Config(128, 64, 32, 8, 2), Config(64, 64, 32, 4, 2)),
    },
}
# Without matrix instructions a thread holds its operands in registers.
_FMA: dict[str, tuple[Config, ...]] = {
    "": (Config(64, 64, 16, 8, 3), Config(32, 64, 16, 4, 3)),
    "glu_up": (Config(64, 32, 16, 8, 3), Config(32, 32, 16, 4, 3)),
}


def candidates(
    kind: str, hardware: str, precision: str, rows: int, experts: int, n: int, k: int
) -> list[Config]:
    """Return the configurations worth trying, the default first.

    Args:
        kind: one of KINDS.
        hardware: one of HARDWARE, or "interpreted".
        precision: one of PRECISIONS.
        rows: of all experts together.
        experts: how many share the rows.
        n: columns of the result; for a weight's gradient its I.
        k: what is summed over; for a weight's gradient its O.
    """
    table = _TABLE.get((hardware, precision), _FMA)
    configs = (INTERPRETED,) if hardware == "interpreted" else table.get(kind, table[""])
    if kind == "weight":
        fitted = (
            replace(c, block_m=_fit(c.block_m, k), block_n=_fit(c.block_n, n)) for c in configs
        )
    else:
        mean = rows // experts
        fitted = (
            replace(
                c,
                # More rows than an expert has would be computed for nothing.
                block_m=_fit(c.block_m, mean),
                block_n=_fit(c.block_n, n),
                block_k=_fit(c.block_k, k),
            )
            for c in configs
        )
    return list(dict.fromkeys(fitted))


def choose(
    kind: str,
    hardware: str,
    precision: str,
    shape: tuple[int, int, int, int],
    launch: Callable[[Config], None],
) -> Config:
    """Return the configuration to launch with: the tuner's, where there is one, else the default.

    Args:
        kind: see `candidates`.
        hardware: see `candidates`.
        precision: see `candidates`.
        shape: (rows, experts, n, k) of `candidates`.
        launch: runs the product with a configuration; may be called any number of times.
    """
    rows, experts, n, k = shape
    # Of the class that timings are kept for, whichever of its sizes comes first.
    classes = autotune.bucket(rows), autotune.bucket(experts)
    choices = candidates(kind, hardware, precision, *classes, n, k)
    return autotune.pick(kind, (hardware, precision, *shape), choices, launch)


def _fit(block: int, size: int) -> int:
    """Return the block, or the power of two from 16 on that holds `size`, if that is smaller."""
    return min(block, max(16, 1 << max(size - 1, 0).bit_length()))
