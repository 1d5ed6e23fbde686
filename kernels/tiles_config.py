"""Lists a few tile sizes for each kind of grouped matrix product, by hardware, dtype and shape.

The candidates were not chosen by timing. The first of each list is the default: the largest tile that
compiles for its hardware without register spills (`benchmarks.compile_table` prints the figures, and a test
checks them).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from fairseq_tutel.kernels import autotune


@dataclass(frozen=True)
class Config:
    """The tile sizes and launch parameters of one kernel for grouped matrix products.

    Attributes:
        block_m: rows of an output tile (O for a weight gradient, which has shape [O, I]).
        block_n: columns of an output tile (I for a weight gradient).
        block_k: elements summed per step (rows for a weight gradient).
        warps: warps per program.
        stages: pipeline stages, that is, steps whose loads are in flight at once.
        group: row tiles that are processed together for all columns, so that weights are read from L2.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8

    @property
    def blocks(self) -> dict[str, int]:
        """The tile sizes as the compile-time constants of a kernel over row tiles."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP": self.group,
        }


# up, glu_up: x @ fc1.T with the activation; linear: one product; dx, glu_dx: the gradient of input rows, in
# one or two products; hidden, glu_hidden: the gradient of the hidden rows; weight: a weight gradient.
KINDS = ("up", "glu_up", "linear", "dx", "glu_dx", "hidden", "glu_hidden", "weight")
HARDWARE = ("hopper", "ampere", "amd")
# half: fp16 and bf16; tf32; tf32x3: fp32 as three TF32 products; ieee: fp32 without tensor cores.
PRECISIONS = ("half", "tf32", "tf32x3", "ieee")

# Small tiles, so that tests cover the edges of tiles. The cost of an interpreted program hardly depends on
# its tile size.
INTERPRETED = Config(64, 16, 16, warps=1, stages=1, group=2)

# (hardware, precision) -> kind -> candidates. "" is the entry for all other kinds.
_TABLE: dict[tuple[str, str], dict[str, tuple[Config, ...]]] = {
    ("hopper", "half"): {
        "": (
            # Three stages, unlike four, leave room for two programs per multiprocessor.
            Config(128, 128, 64, 8, 3),
            Config(128, 128, 64, 8, 4),
            Config(128, 256, 64, 8, 3),
            Config(64, 128, 64, 4, 4),
        ),
        "hidden": (Config(128, 128, 64, 8, 3), Config(128, 128, 64, 8, 4), Config(64, 128, 64, 4, 4)),
        # This needs more than 128 registers, so one program per multiprocessor runs with any stages.
        "glu_hidden": (Config(128, 128, 64, 8, 4), Config(128, 64, 64, 8, 4), Config(64, 128, 64, 8, 4)),
        # This product has two accumulators, which need as many registers as one accumulator of 256 columns.
        "glu_up": (Config(128, 128, 64, 8, 3), Config(128, 64, 64, 8, 4), Config(64, 128, 64, 8, 3)),
    },
    ("hopper", "tf32"): {
        "": (Config(128, 128, 32, 8, 4), Config(64, 128, 32, 4, 4)),
        "glu_up": (Config(128, 64, 32, 8, 4), Config(64, 64, 32, 4, 4)),
        "glu_hidden": (Config(128, 64, 32, 8, 4), Config(64, 64, 32, 4, 4)),
    },
    # The rest of every operand after its TF32 number is an operand, too.
    ("hopper", "tf32x3"): {
        "": (Config(64, 64, 32, 4, 3), Config(64, 64, 16, 4, 3)),
        # On sm_120, which multiplies from registers, the first spills 56 bytes.
        "glu_up": (Config(64, 64, 32, 4, 3), Config(64, 32, 32, 4, 3), Config(64, 64, 16, 4, 3)),
    },
    # These tiles need at most 96 KiB of shared memory, so they also run on consumer GPUs.
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
    ("ampere", "tf32x3"): {
        "": (Config(64, 64, 32, 4, 3), Config(64, 64, 16, 4, 3)),
        "glu_up": (Config(64, 32, 32, 4, 3), Config(64, 32, 16, 4, 3)),
    },
    # These tiles need at most 64 KiB of shared memory.
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
# For hardware without matrix instructions, on which a thread holds its operands in registers.
_FMA: dict[str, tuple[Config, ...]] = {
    "": (Config(64, 64, 16, 8, 3), Config(32, 64, 16, 4, 3)),
    "glu_up": (Config(64, 32, 16, 8, 3), Config(32, 32, 16, 4, 3)),
}


def candidates(
    kind: str, hardware: str, precision: str, rows: int, experts: int, n: int, k: int
) -> list[Config]:
    """Return the tile configurations worth measuring for a matrix product, the default first.

    Args:
        kind: one of KINDS.
        hardware: one of HARDWARE, or "interpreted".
        precision: one of PRECISIONS.
        rows: the total rows of all experts.
        experts: the number of experts.
        n: columns of the result (I for a weight gradient).
        k: the dimension that is summed over (O for a weight gradient).
    """
    table = _TABLE.get((hardware, precision), _FMA)
    configs = (INTERPRETED,) if hardware == "interpreted" else table.get(kind, table[""])
    if kind == "weight":
        fitted = (replace(c, block_m=_fit(c.block_m, k), block_n=_fit(c.block_n, n)) for c in configs)
    else:
        mean = rows // experts
        fitted = (
            replace(
                c,
                # A tile with more rows than an expert has would waste computation.
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
    """Return the tile configuration of a kernel launch: the autotuner's choice, or the default.

    Args:
        kind: see `candidates`.
        hardware: see `candidates`.
        precision: see `candidates`.
        shape: (rows, experts, n, k) of `candidates`.
        launch: runs the product with a configuration; may be called any number of times.
    """
    rows, experts, n, k = shape
    # Candidates depend only on the bucket of rows and experts, because timings are stored per bucket.
    key = hardware, precision, autotune.bucket(rows), autotune.bucket(experts), n, k
    return autotune.pick(kind, key, functools.partial(_candidates, kind, *key), launch)


# Building the candidates takes longer than a launch.
_candidates = functools.lru_cache(candidates)


def _fit(block: int, size: int) -> int:
    """Limit a tile dimension `block` to the smallest power of two that is >= 16 and covers `size`."""
    return min(block, max(16, 1 << max(size - 1, 0).bit_length()))
