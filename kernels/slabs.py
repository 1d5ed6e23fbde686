"""Some rows of a table [N, V] at a time: what is made of them stays in a cache, or is small beside it."""

from collections.abc import Iterator

from torch import Tensor

# Numbers of a slab: on a CPU what its second-level cache holds, else enough to fill a device.
SLAB = {"cpu": 2**18}
SLAB_OF_OTHERS = 2**26


def slabs(table_NV: Tensor) -> Iterator[slice]:
    """Yield the rows of each slab; one at least, however wide."""
    num_rows, words = table_NV.shape
    size = SLAB.get(table_NV.device.type, SLAB_OF_OTHERS)
    step = max(1, size // max(words, 1))
    for first in range(0, num_rows, step):
        yield slice(first, first + step)
