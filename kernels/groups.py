"""How many rows each expert has, known on the host, on the device or on both."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Groups:
    """The sizes of e groups of consecutive rows; what lies behind the last group belongs to nobody.

    The side that is not known is made when it is first asked for: on a GPU `host` waits for the device,
    so kernels read `counts`.
    """

    def __init__(self, counts_E: Tensor | None, host: Sequence[int] | None) -> None:
        self._counts, self._host = counts_E, host
        self._device = None if counts_E is None else counts_E.device

    @classmethod
    def of_tensor(cls, counts_E: Tensor) -> "Groups":
        """Return the groups of [e] int64 counts on the device of the rows."""
        return cls(counts_E, None)

    @classmethod
    def of_host(cls, counts: Sequence[int], device: torch.device) -> "Groups":
        """Return the groups of e host integers, for rows on `device`."""
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
