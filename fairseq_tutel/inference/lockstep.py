"""Lockstep: ranks that share experts call layers at a pace of their own, or not at all.

In a training all ranks make the same calls. Where a model is used, one rank has more sentences, longer
ones or none, so ranks first agree on whose call comes next: each says which layer it wants, the layer that
most want runs, and the others take part in it without tokens, then ask again. Nobody need know how
decoding goes.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fairseq_tutel.comm.collectives import all_gather

# What a rank says that wants no layer: for now, or for good.
RESTS = -1
IS_DONE = -2


def next_layer(wishes: Sequence[int]) -> int | None:
    """Return the layer that most ranks want, the lowest of several; None where nobody wants one."""
    votes = Counter(wish for wish in wishes if wish >= 0)
    return min(votes, key=lambda index: (-votes[index], index), default=None)


class Lockstep:
    """One rank's part in it.

    A rank that fails need not say so: its connections break, and the others' next agreement with them.

    Args:
        group: the ranks that share experts, None for all. Each must `add` the same layers in the same
            order, and come to an `end`.

    Attributes:
        calls: this rank's own calls so far.
        served: those of others that it took part in without tokens.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.layers: list[Callable[[], None]] = []
        self.calls = self.served = 0

    def add(self, run_without_tokens: Callable[[], None]) -> int:
        """Return the index of a new layer; `run_without_tokens` joins the collectives of a call."""
        self.layers.append(run_without_tokens)
        return len(self.layers) - 1

    def wait_for_turn(self, index: int) -> None:
        """Return when it is this layer's turn; the caller then makes its collectives. Serve until then.

        Raises:
            CommunicationError: a rank did not come to the agreement.
        """
        while next_layer(wishes := self._wishes(index)) != index:
            self._serve(wishes)
        self.calls += 1

    def rest(self) -> None:
        """Serve until no rank wants a layer. All ranks that are not at their end must call it."""
        while self._serve(self._wishes(RESTS)):
            pass

    def end(self) -> None:
        """Serve until every rank is at its end; the last call of all."""
        while set(wishes := self._wishes(IS_DONE)) != {IS_DONE}:
            self._serve(wishes)

    def _wishes(self, own: int) -> list[int]:
        """Tell all ranks what this one wants, and return what each wants."""
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        wish = torch.tensor(own, device=device)
        return all_gather(wish, "the agreement on the next layer", self.group).tolist()

    def _serve(self, wishes: Sequence[int]) -> bool:
        """Take part in the next call; return whether there was one."""
        index = next_layer(wishes)
        if index is None:
            return False
        self.layers[index]()
        self.served += 1
        return True
