"""The number of rows of each expert, available on the host, on the device or on both."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Groups:
    """The sizes of e groups of consecutive rows; rows after the last group belong to no expert.

    `host` and `counts` are computed from each other on first access. On a GPU `host` synchronizes with the
    device, so kernels read `counts`.
    """

    def __init__(self, counts_E: Tensor | None, host: Sequence[int] | None) -> None:
        self._counts, self._host = counts_E, host
        self._device = None if counts_E is None else counts_E.device

    @classmethod
    def of_tensor(cls, counts_E: Tensor) -> "Groups":
        """Create the groups from counts, [e] int64 on the device of the rows."""
        return cls(counts_E, None)

    @classmethod
    def of_host(cls, counts: Sequence[int], device: torch.device) -> "Groups":
        """Create the groups from e host integers, for rows on `device`."""
        groups = cls(None, counts)
        groups._device = device
        return groups

    @property
    def host(self) -> Sequence[int]:
        """The counts as e host integers."""
        if self._host is None:
            assert self._counts is not None
            self._host = self._counts.tolist()
        return self._host

    @property
    def counts(self) -> Tensor:
        """The counts [e] int64 on the device of the rows."""
        if self._counts is None:
            self._counts = torch.tensor(self._host, dtype=torch.int64, device=self._device)
        return self._counts
