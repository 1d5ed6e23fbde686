"""A call ID identifies a layer and one of its calls. Ranks compare call IDs before an exchange.

Without call IDs, ranks that call different layers would exchange rows without an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel.parallel.guard import CommunicationError, name_ranks

# In a call ID, bits 40 and above are the layer's index, bit 39 is the mode, and bits 0 to 38 count calls.
_LAYER_BIT, _TRAINING_BIT = 40, 39

Function = TypeVar("Function", bound=Callable[..., Any])


# This table lists the layers of each group in the order of their construction, which is equal on all ranks.
_layers: WeakKeyDictionary[dist.ProcessGroup, list["CallCounter"]] = WeakKeyDictionary()


def _untraced(function: Function) -> Function:
    """Exclude a function from torch.compile, which would recompile it for every call ID."""
    # torch.compiler.disable has the same effect, but imports all of torch.compile.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class CallCounter:
    """Counts the calls of one layer for call IDs. All ranks construct the same layers in the same order."""

    def __init__(self, group: dist.ProcessGroup, name: str, num_local: int) -> None:
        self.layers = _layers.setdefault(group, [])
        self.index, self.count = len(self.layers), 0
        self.name, self.num_local = name or f"layer {self.index}", num_local
        self.layers.append(self)


@dataclass(frozen=True)
class CallId:
    """Identifies a layer's next call and mode, so that ranks can check whether their calls match."""

    counter: CallCounter
    training: bool = False

    @_untraced
    def prepended_to(self, counts_PX: Tensor) -> Tensor:
        """Return row counts with the call ID as a new first column, padded to the widest layer's width.

        Each call of this method counts as one call of the layer. Without padding, ranks that run different
        layers would exchange tensors of unequal sizes, and raise an unclear error or hang.
        """
        counter = self.counter
        mode_and_count = self.training << _TRAINING_BIT | counter.count
        counter.count += 1
        widest = max(layer.num_local for layer in counter.layers)
        missing = max(0, widest - counts_PX.shape[1])
        return torch.constant_pad_nd(counts_PX, (1, missing), counter.index << _LAYER_BIT | mode_and_count)


@_untraced
def compare(call_ids_P: Tensor, operation: str, group: dist.ProcessGroup) -> None:
    """Check on the host that all ranks of a group have the same call ID.

    Raises:
        CommunicationError: the call IDs of ranks differ. The message names each rank's layer and call.
    """
    numbers = call_ids_P.tolist()
    if len(set(numbers)) == 1:
        return
    ranks_of: dict[int, list[int]] = {}
    for rank, number in zip(dist.get_process_group_ranks(group), numbers, strict=True):
        ranks_of.setdefault(number, []).append(rank)
    calls = "; ".join(
        f"{name_ranks(ranks)} in {_call(number, group)}" for number, ranks in ranks_of.items()
    )
    raise CommunicationError(
        f"rank {dist.get_rank()} could not finish {operation}, because ranks are in different calls "
        f"({calls}); build the same layers on all ranks, and call them in the same order and mode, also if "
        "a training step generates or evaluates."
    )


def _call(number: int, group: dist.ProcessGroup) -> str:
    layer, mode = number >> _LAYER_BIT, "training" if number >> _TRAINING_BIT & 1 else "evaluation"
    known = _layers.get(group, [])
    name = known[layer].name if layer < len(known) else f"layer {layer}"
    return f"call {1 + (number & ((1 << _TRAINING_BIT) - 1))} of {name}, for {mode}"


# Call IDs that are being copied to the host, with the copy's event and the arguments of `compare`.
_pending: list[tuple[Any, Tensor, str, dist.ProcessGroup]] = []


@_untraced
def compare_later(call_ids_P: Tensor, operation: str, group: dist.ProcessGroup) -> None:
    """Compare call IDs now or, on a GPU, in the next `compare_later`, so that the host need not wait."""
    if not call_ids_P.is_cuda:
        compare(call_ids_P, operation, group)
        return
    for copied, earlier_P, what, of in _pending:
        copied.synchronize()
        compare(earlier_P, what, of)
    host_P = call_ids_P.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    _pending[:] = [(copied, host_P, operation, group)]
