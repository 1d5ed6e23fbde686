"""Stamp: which call of which layer a rank is in, a number that ranks compare where they read counts anyway.

Rows of one layer would be taken for another's without a word where ranks make different calls.
P ranks, X counts for each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.ranks.guard import CommunicationError, name_ranks

_LAYER_BIT, _TRAINING_BIT = 40, 39  # below: how many calls there were

Function = TypeVar("Function", bound=Callable[..., Any])


class _Layer(NamedTuple):
    name: str
    num_local: int


# The layers of a group in the order in which they were made, the same on every rank.
_layers: WeakKeyDictionary[dist.ProcessGroup, list[_Layer]] = WeakKeyDictionary()


def _untraced(function: Function) -> Function:
    """Keep torch.compile out: it would compile anew for every number that differs.

    This is what torch.compiler.disable sets, without its import of all of torch.compile.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class Calls:
    """Counts the calls of a layer. Every rank of its group makes the same layers in the same order."""

    def __init__(self, group: dist.ProcessGroup, name: str, num_local: int) -> None:
        layers = _layers.setdefault(group, [])
        self.group, self.layer, self.made = group, len(layers), 0
        layers.append(_Layer(name or f"layer {self.layer}", num_local))


@dataclass(frozen=True)
class Stamp:
    """Of one call of a layer; of none, for exchanges without one.

    Attributes:
        calls: of the layer, of which this is the next.
        training: the layer's mode.
    """

    calls: Calls | None = None
    training: bool = False

    @_untraced
    def beside(self, counts_PX: Tensor) -> Tensor:
        """Return what travels, [P, 1 + X] or wider: the call's number before the counts. Once a call.

        It is as wide as for the layer with most experts: an exchange of unequal sizes would end in the
        backend's words, or never.
        """
        if self.calls is None:
            return torch.constant_pad_nd(counts_PX, (1, 0), 0)
        mode_and_made = self.training << _TRAINING_BIT | self.calls.made
        self.calls.made += 1
        widest = max(layer.num_local for layer in _layers[self.calls.group])
        missing = max(0, widest - counts_PX.shape[1])
        return torch.constant_pad_nd(
            counts_PX, (1, missing), self.calls.layer << _LAYER_BIT | mode_and_made
        )


NO_STAMP = Stamp()


@_untraced
def compare(stamps_P: Tensor, operation: str, group: dist.ProcessGroup) -> None:
    """Raise where the ranks of a group do not make the same call.

    Args:
        stamps_P: the number of each rank, on the host.
        operation: ends the sentence "rank 1 could not finish …".
        group: the ranks.

    Raises:
        CommunicationError: naming each rank's layer and call.
    """
    numbers = stamps_P.tolist()
    if len(set(numbers)) == 1:
        return
    ranks_of: dict[int, list[int]] = {}
    for rank, number in zip(dist.get_process_group_ranks(group), numbers, strict=True):
        ranks_of.setdefault(number, []).append(rank)
    calls = "; ".join(
        f"{name_ranks(sorted(ranks))} in {_call(number, group)}"
        for number, ranks in ranks_of.items()
    )
    raise CommunicationError(
        f"rank {dist.get_rank()} could not finish {operation}, since ranks make different calls ({calls}); "
        "let all ranks make the same layers, and call the same ones in the same order and mode, also where "
        "a training step generates or evaluates."
    )


def _call(number: int, group: dist.ProcessGroup) -> str:
    layer = number >> _LAYER_BIT
    mode = "training" if number >> _TRAINING_BIT & 1 else "evaluation"
    made = number & ((1 << _TRAINING_BIT) - 1)
    known = _layers.get(group, [])
    name = known[layer].name if 0 <= layer < len(known) else f"layer {layer}"
    return f"call {made + 1} of {name}, for {mode}"


class _Late(NamedTuple):
    stamps_P: Tensor
    arrived: Any
    operation: str
    group: dist.ProcessGroup


_late: list[_Late] = []


@_untraced
def compare_late(stamps_P: Tensor, operation: str, group: dist.ProcessGroup) -> None:
    """Compare stamps that no host read brings along: those of a GPU at the next call, without waiting.

    Args:
        stamps_P: [P] of each rank, on its device.
        operation: see `compare`.
        group: likewise.

    Raises:
        CommunicationError: see `compare`.
    """
    if not stamps_P.is_cuda:
        compare(stamps_P, operation, group)
        return
    for late in _late:
        late.arrived.synchronize()
        compare(late.stamps_P, late.operation, late.group)
    host_P = stamps_P.to("cpu", non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    _late[:] = [_Late(host_P, arrived, operation, group)]
