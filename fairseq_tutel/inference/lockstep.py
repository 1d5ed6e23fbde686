"""Lockstep: inference with expert parallelism if ranks call layers at different times, or not at all.

One rank has more sentences, longer ones or none. So ranks first agree on the next call: each requests a
layer, the most requested one runs, and the others join its collectives without tokens and request again.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fairseq_tutel.comm.collectives import all_gather

# The requests of a rank without a layer: for now, or until the end.
RESTS = -1
IS_DONE = -2


def next_layer(requests: Sequence[int]) -> int | None:
    """Return the layer that most ranks request, of several the lowest; None without requests."""
    votes = Counter(request for request in requests if request >= 0)
    return min(votes, key=lambda index: (-votes[index], index), default=None)


class Lockstep:
    """One rank's side of the lockstep; `group` has the ranks that share experts, None for all.

    Each rank must `add` the same layers in the same order, and call `end`. A rank that fails sends no
    message: its connections break, so that the others' next agreement fails.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.layers: list[Callable[[], None]] = []
        self.calls = 0  # of this rank
        self.served = 0  # calls of other ranks that this rank joined without tokens

    def add(self, run_without_tokens: Callable[[], None]) -> int:
        """Return the index of a new layer; `run_without_tokens` joins the collectives of a call."""
        self.layers.append(run_without_tokens)
        return len(self.layers) - 1

    def wait_for_turn(self, index: int) -> None:
        """Join other calls until it is this layer's turn; the caller then runs the layer."""
        while next_layer(requests := self._requests(index)) != index:
            self._join(requests)
        self.calls += 1

    def rest(self) -> None:
        """Join calls until no rank requests a layer. Collective for all ranks that have not ended."""
        while self._join(self._requests(RESTS)):
            pass

    def end(self) -> None:
        """Join calls until every rank has ended."""
        while set(requests := self._requests(IS_DONE)) != {IS_DONE}:
            self._join(requests)

    def _requests(self, own: int) -> list[int]:
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        request = torch.tensor(own, device=device)
        return all_gather(request, "the agreement on the next layer", self.group).tolist()

    def _join(self, requests: Sequence[int]) -> bool:
        """Join the next call without tokens; return whether there was one."""
        index = next_layer(requests)
        if index is None:
            return False
        self.layers[index]()
        self.served += 1
        return True
