"""Feature sharing between ensemble members: each forward pass pauses at a layer until all reach it.

M members.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn


def shared(features_M: Sequence[Tensor], keep: float, training: bool) -> list[Tensor]:
    """Return each member's features with a part of every other member's features added to them.

    Member m gets h_m + the sum over other members m' of sigma * h_m'. In training, sigma is an elementwise
    Bernoulli(keep) mask, drawn for every pair of members. In evaluation, sigma is `keep`. (The authors'
    code draws masks in evaluation, too, so outputs vary.)

    Source: Lee et al. 2017, "Confident Multiple Choice Learning", section 3.3.
    """
    if not training:
        all_of_them = torch.stack(list(features_M)).sum(dim=0)
        return [h + keep * (all_of_them - h) for h in features_M]
    mixed = list(features_M)
    for m, i in itertools.permutations(range(len(mixed)), 2):
        mixed[m] = mixed[m] + features_M[i] * torch.empty_like(features_M[i]).bernoulli_(keep)
    return mixed


def run_and_share(
    members: Sequence[Callable[[], Any]],
    layers: Sequence[nn.Module],
    share: Callable[[list[Tensor]], list[Tensor]],
) -> list[Any]:
    """Run all members up to their shared layers, mix the layers' outputs by `share`, and finish the runs.

    Each forward pass runs in its own thread, since it must pause. Threads run one at a time in a fixed
    order, so random numbers and communication are reproducible. A layer's output is a tensor, or a sequence
    that begins with a tensor.
    """
    with ThreadPoolExecutor(len(members)) as pool:
        runs = [_Run(forward, layer) for forward, layer in zip(members, layers, strict=True)]
        try:
            mixed = share([run.until_pause(pool) for run in runs])
            return [run.to_end(h) for run, h in zip(runs, mixed, strict=True)]
        finally:
            for run in runs:
                run.give_up()


class _GivenUpError(Exception):
    """Raised in a paused member to end its thread after another member failed."""


class _Run:
    """A member's forward pass in its own thread, which pauses after one layer."""

    def __init__(self, forward: Callable[[], Any], layer: nn.Module) -> None:
        self._forward, self._layer = forward, layer
        # First the layer's output, then the finished forward pass.
        self._events: SimpleQueue[Tensor | Future] = SimpleQueue()
        self._features: SimpleQueue[Tensor | None] = SimpleQueue()
        # The caller's torch modes, which apply only to the caller's thread; `_work` sets them again.
        self._grad, kinds = torch.is_grad_enabled(), ("cpu", "cuda")
        self._casts = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def until_pause(self, pool: ThreadPoolExecutor) -> Tensor:
        """Start the forward pass; when it pauses after the shared layer, return the layer's output."""
        pool.submit(self._work).add_done_callback(self._events.put)
        event = self._events.get()
        if torch.is_tensor(event):
            return event
        event.result()  # raises if the forward failed
        raise ValueError(
            "an ensemble member did not call the layer whose output is shared; give "
            "--ensemble-share-after a layer that every forward pass calls."
        )

    def to_end(self, feature: Tensor) -> Any:
        """Continue the forward pass with `feature` as the layer's output; return the result."""
        self._features.put(feature)
        event = self._events.get()
        if torch.is_tensor(event):
            raise ValueError(
                "an ensemble member calls the layer whose output is shared more than once; give "
                "--ensemble-share-after another layer."
            )
        return event.result()

    def give_up(self) -> None:
        """Abort the forward pass if it is paused at the shared layer."""
        self._features.put(None)

    def _work(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(self._layer.register_forward_hook(self._pause).remove)
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if self._device is not None:
                stack.enter_context(torch.cuda.device(self._device))
            return self._forward()

    def _pause(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        feature = output[0] if isinstance(output, tuple | list) else output
        if not torch.is_tensor(feature):
            raise ValueError(
                f"the layer whose output is shared returns {type(feature).__name__}, which is not a "
                "tensor; give --ensemble-share-after another layer."
            )
        self._events.put(feature)
        mixed = self._features.get()
        if mixed is None:
            raise _GivenUpError
        return mixed if torch.is_tensor(output) else (mixed, *output[1:])
