"""Lockstep: expert parallelism for inference in which ranks call different layers, or no layer.

In inference, ranks can have different numbers and lengths of sentences. Before each call, the ranks
therefore agree on a layer: each rank requests a layer, and the layer with the most requests runs. Ranks
that requested another layer join the winning layer's collectives without tokens, and request again.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fairseq_tutel.parallel.collectives import all_gather

# Requests of a rank that needs no layer: for the moment, or until the end.
RESTS = -1
IS_DONE = -2


def next_layer(requests: Sequence[int]) -> int | None:
    """Return the index of the layer that most ranks request, or None if no rank requests a layer.

    If two layers have equally many requests, the lower index is returned.
    """
    votes = Counter(request for request in requests if request >= 0)
    return min(votes, key=lambda index: (-votes[index], index), default=None)


class Lockstep:
    """Coordinates the layer calls of one rank with those of the other ranks of an EP group.

    Each rank must call `add` with the same layers in the same order, and then call `end`. If a rank fails,
    its connections break, and the next agreement of the other ranks fails.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.layers: list[Callable[[], None]] = []
        self.calls = 0  # Calls that this rank requested.
        self.served = 0  # Calls of other ranks that this rank joined without tokens.

    def add(self, run_without_tokens: Callable[[], None]) -> int:
        """Add a layer, and return its index; `run_without_tokens` joins a layer call without tokens."""
        self.layers.append(run_without_tokens)
        return len(self.layers) - 1

    def wait_for_turn(self, index: int) -> None:
        """Join calls of other layers until the ranks agree on layer `index`, which the caller then runs."""
        while next_layer(requests := self._requests(index)) != index:
            self._join(requests)
        self.calls += 1

    def rest(self) -> None:
        """Join the calls of other ranks, without tokens, until no rank requests a layer.

        All ranks that have not called `end` must call `rest` together.
        """
        while self._join(self._requests(RESTS)):
            pass

    def end(self) -> None:
        """Join the calls of other ranks, without tokens, until every rank has called `end`."""
        while set(requests := self._requests(IS_DONE)) != {IS_DONE}:
            self._join(requests)

    def _requests(self, own: int) -> list[int]:
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        request = torch.tensor(own, device=device)
        return all_gather(request, "the agreement on the next layer", self.group).tolist()

    def _join(self, requests: Sequence[int]) -> bool:
        """Join the next layer call without tokens; return whether any rank had requested a layer."""
        index = next_layer(requests)
        if index is None:
            return False
        self.layers[index]()
        self.served += 1
        return True
