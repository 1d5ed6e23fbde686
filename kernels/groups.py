"""The number of rows of each expert, available on the host and on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Groups:
    """The numbers of consecutive rows that belong to each expert. Rows after the last group have no expert.

    `host` and `counts` hold the same numbers, and each is computed from the other at its first access. On a
    GPU, an access to `host` may synchronize with the device. Kernels therefore read `counts` or `tiles`.
    """

    def __init__(self, counts_E: Tensor | None, host: Sequence[int] | None) -> None:
        self._counts, self._host = counts_E, host
        self._device = None if counts_E is None else counts_E.device
        self._tiles: tuple[int, Tensor] | None = None

    @classmethod
    def of_tensor(cls, counts_E: Tensor, tiles: Tensor | None = None, num_rows: int = 0) -> "Groups":
        """Create groups of rows from a tensor of row counts, [E] int64 on the device of the rows.

        `tiles` are the tables of row tiles for `num_rows` rows, if a kernel has already written the tables.
        """
        groups = cls(counts_E, None)
        groups._tiles = None if tiles is None else (num_rows, tiles)
        return groups

    @classmethod
    def of_host(cls, counts: Sequence[int], device: torch.device) -> "Groups":
        """Create groups of rows from a list of row counts on the host, for rows on `device`."""
        groups = cls(None, counts)
        groups._device = device
        return groups

    @property
    def host(self) -> Sequence[int]:
        """The number of rows of each group, as integers on the host."""
        if self._host is None:
            assert self._counts is not None
            self._host = self._counts.tolist()
        return self._host

    @property
    def counts(self) -> Tensor:
        """The number of rows of each group, [E] int64 on the device of the rows."""
        if self._counts is None:
            self._counts = torch.tensor(self._host, dtype=torch.int64, device=self._device)
        return self._counts

    def tiles(self, num_rows: int) -> Tensor:
        """The tables of row tiles, which the kernels of grouped products read; see `row_tiles`.

        The tables are computed at the first call, for all products of forward and backward.
        """
        if self._tiles is not None and self._tiles[0] == num_rows:
            return self._tiles[1]
        from fairseq_tutel.kernels.triton_tiles import row_tiles

        tiles = row_tiles(self.counts, num_rows)
        if not torch.compiler.is_compiling():  # Under torch.compile, autograd nodes cannot set attributes.
            self._tiles = num_rows, tiles
        return tiles
