"""Splits the N rows of a table [N, V] into chunks, so that intermediate results are small."""

from collections.abc import Iterator

from torch import Tensor

# The largest number of elements of a row chunk, by type of device. On a CPU, a row chunk fits into the L2
# cache. On a GPU, a row chunk is large enough to use all multiprocessors.
ELEMENTS = {"cpu": 2**18}
ELEMENTS_ELSEWHERE = 2**26


def row_chunks(table_NV: Tensor) -> Iterator[slice]:
    """Yield the range of rows of each chunk of a table. Every chunk has at least one row."""
    num_rows, words = table_NV.shape
    size = ELEMENTS.get(table_NV.device.type, ELEMENTS_ELSEWHERE)
    step = max(1, size // max(words, 1))
    for first in range(0, num_rows, step):
        yield slice(first, first + step)
