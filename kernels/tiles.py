"""The tile sizes of grouped matrix products, in one table by hardware, precision, kind and shape.

`python -m benchmarks.tiles` times other tiles on the GPU at hand and prints rows for the table. A test
compiles every tile of the table for its hardware and checks that no register spills.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple


class Tile(NamedTuple):
    """The tile sizes and launch parameters of one kernel for grouped matrix products.

    Attributes:
        block_m: the number of rows of an output tile.
        block_n: the number of columns of an output tile.
        block_k: the number of elements (for a weight gradient, rows) that are summed in one step.
        warps: warps per program.
        stages: pipeline stages, that is, steps whose loads are in flight at once.
        group: the number of row tiles that are computed together, so that weights are read from L2.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8

    @property
    def blocks(self) -> dict[str, int]:
        """The tile sizes as the compile-time constants of a kernel with row tiles."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP": self.group,
        }


class Row(NamedTuple):
    """A row of the table of tile sizes.

    Attributes:
        hardware: hardware classes, separated by spaces; see `triton_launch.hardware_of`.
        precisions: precisions, separated by spaces.
        kinds: kinds of products, separated by spaces.
        tile: the tile of these products.
        reason: the device, shape and speed of the measurement that chose the tile, or COMPILED.
        where: a function of (rows, n, k) that returns whether the row applies; None: always. `rows` is an
            expert's mean number of rows, rounded up to a power of two. `choose` defines n and k.
    """

    hardware: str
    precisions: str
    kinds: str
    tile: Tile
    reason: str
    where: Callable[[int, int, int], bool] | None = None


# The possible numbers of rows of a tile. A table of row tiles exists for each of these numbers.
BLOCKS_M = (16, 32, 64, 128, 256)


def num_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return an upper bound of the number of row tiles of `block_m` rows that all experts need."""
    return num_rows // block_m + num_experts + 1


def table_start(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return the index in the result of `row_tiles` at which the table for this `block_m` starts."""
    smaller = (num_tiles(num_rows, num_experts, block) for block in BLOCKS_M if block < block_m)
    return num_experts + 1 + 3 * sum(smaller)


# up: x @ fc1.T and the activation. linear: rows @ weight.T. dx: the gradient of input rows. hidden: the
# gradient of hidden rows. weight: a weight gradient. A prefix glu_ means gated experts, whose fc3 needs
# more products. A prefix relu_ means the activation relu, which needs the fewest registers.
KINDS = "up relu_up glu_up linear dx glu_dx hidden relu_hidden glu_hidden weight"
# sm_80: all NVIDIA GPUs before sm_90. Its tiles must fit in the 99 KiB of shared memory of sm_86 and sm_89.
HARDWARE = "sm_80 sm_90 sm_100 sm_120 amd"
# half: fp16 and bf16. tf32: fp32 in TF32. tf32x3: fp32 as three TF32 products. ieee: without tensor cores.
PRECISIONS = "half tf32 tf32x3 ieee"

COMPILED = "not measured: a large tile that compiles without spilled registers"
NVIDIA, NEWER, GLU = "sm_80 sm_90 sm_100 sm_120", "sm_90 sm_100 sm_120", "glu_up glu_hidden"

# A product uses the first row that applies. The H100's rows were measured on one H100 80GB in bf16 with
# the shapes A, C and E of benchmarks/layer_cases.py, which have 2,048 to 4,096 rows per expert.
TABLE = (
    Row("sm_90", "half", "linear", Tile(256, 128, 64, 8, 4), "H100, A, C, E: 722, 671, 567 TFLOP/s",
        lambda rows, n, k: rows >= 1024),
    Row("sm_90", "half", "dx glu_dx", Tile(128, 256, 64, 8, 3), "H100, A, C, E: 774, 724, 657 TFLOP/s",
        lambda rows, n, k: rows >= 1024),
    Row("sm_90", "half", "weight", Tile(128, 256, 64, 8, 4), "H100, A, C, E: 752, 614, 663 TFLOP/s",
        lambda rows, n, k: rows >= 1024),
    Row("sm_90", "half", "relu_up", Tile(128, 256, 64, 8, 3), "H100, A: 585 TFLOP/s",
        lambda rows, n, k: rows >= 1024),
    Row("sm_90", "half", "relu_hidden glu_hidden", Tile(128, 256, 64, 8, 3),
        "H100, A, C, E: 407, 533, 392 TFLOP/s",
        lambda rows, n, k: rows >= 1024),
    Row("sm_90", "half", "glu_up glu_hidden", Tile(128, 128, 64, 8, 4), "H100, C, E, up: 549, 583 TFLOP/s"),
    Row("sm_100 sm_120", "half", "glu_hidden", Tile(128, 128, 64, 8, 4), COMPILED),
    Row(NEWER, "half", KINDS, Tile(128, 128, 64, 8, 3), COMPILED),
    Row(NEWER, "tf32", GLU, Tile(128, 64, 32, 8, 4), COMPILED),
    Row(NEWER, "tf32", KINDS, Tile(128, 128, 32, 8, 4), COMPILED),
    # These tiles need at most 96 KiB of shared memory, so they also run on consumer GPUs.
    Row("sm_80", "half", GLU, Tile(128, 64, 32, 8, 4), COMPILED),
    Row("sm_80", "half", KINDS, Tile(128, 128, 64, 8, 3), COMPILED),
    Row("sm_80", "tf32", GLU, Tile(128, 64, 32, 8, 3), COMPILED),
    Row("sm_80", "tf32", KINDS, Tile(128, 128, 32, 8, 3), COMPILED),
    # These tiles are small, because each operand becomes two TF32 numbers.
    Row("sm_80 sm_120", "tf32x3", "glu_up", Tile(64, 32, 32, 4, 3), COMPILED),
    Row(NVIDIA, "tf32x3", KINDS, Tile(64, 64, 32, 4, 3), COMPILED),
    # These tiles are small, because without matrix instructions, threads hold all operands in registers.
    Row(NVIDIA, "ieee", "glu_up", Tile(64, 32, 16, 8, 3), COMPILED),
    Row(NVIDIA, "ieee", KINDS, Tile(64, 64, 16, 8, 3), COMPILED),
    # These tiles need at most 64 KiB of shared memory.
    Row("amd", "half", "glu_up", Tile(128, 128, 32, 8, 2), COMPILED),
    Row("amd", "half", KINDS, Tile(128, 128, 64, 8, 2), COMPILED),
    Row("amd", "ieee", GLU, Tile(128, 64, 32, 8, 2), COMPILED),
    Row("amd", "ieee", KINDS, Tile(128, 128, 32, 8, 2), COMPILED),
    # These tiles are small, so that the small matrices of tests have several tiles and incomplete tiles.
    Row("interpreted", PRECISIONS, KINDS, Tile(64, 16, 16, 1, 1, 2), "for tests"),
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def choose(kind: str, hardware: str, precision: str, rows: int, experts: int, n: int, k: int) -> Tile:
    """Return the tile sizes of a grouped matrix product, limited to the sizes of its matrices.

    Args:
        kind: one of KINDS.
        hardware: one of HARDWARE, or "interpreted".
        precision: one of PRECISIONS.
        rows: the total rows of all experts.
        experts: the number of experts.
        n: the columns of the result.
        k: the dimension that is summed over, or O for a weight gradient [O, I].
    """
    return _chosen(kind, hardware, precision, _covering(rows // experts), n, k)


@functools.cache  # has few entries, because `rows` is a power of two
def _chosen(kind: str, hardware: str, precision: str, rows: int, n: int, k: int) -> Tile:
    found = rows_of(kind, hardware, precision)
    tile = next(row.tile for row in found if row.where is None or row.where(rows, n, k))
    return fitted(tile, kind, rows, n, k)


def rows_of(kind: str, hardware: str, precision: str) -> list[Row]:
    """Return the table's rows for a kind of product, in order; the last of these rows fits every shape."""
    found = []
    for row in TABLE:
        wanted = ((hardware, row.hardware), (precision, row.precisions), (kind, row.kinds))
        if all(name in names.split() for name, names in wanted):
            found.append(row)
            if row.where is None:
                break
    return found


def fitted(tile: Tile, kind: str, rows: int, n: int, k: int) -> Tile:
    """Return the tile, reduced to the sizes of the matrices; `rows` is the number of rows of an expert."""
    if kind == "weight":
        limits = {"block_m": k, "block_n": n}
    else:
        # A tile with more rows than an expert has would waste computation.
        limits = {"block_m": rows, "block_n": n, "block_k": k}
    return tile._replace(
        **{name: min(getattr(tile, name), _covering(size)) for name, size in limits.items()}
    )


def _covering(size: int) -> int:
    """Return the smallest power of two that is at least 16 and at least `size`."""
    return max(16, next_power_of_2(size))


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least this number. `triton.next_power_of_2` is slower."""
    return 1 << max(number - 1, 0).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """Return the quotient, rounded up. `triton.cdiv` is slower."""
    return -(-number // divisor)
