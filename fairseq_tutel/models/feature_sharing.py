"""Shares features between ensemble members: forward passes pause after a layer, whose outputs are mixed.

The suffix M marks a list with one entry per member.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

FIX = "give a layer that every forward pass calls once."


def shared(features_M: Sequence[Tensor], keep: float, training: bool) -> list[Tensor]:
    """Return each member's features with a part of every other member's features added to them.

    Member m gets h_m plus the sum over the other members m' of sigma * h_m'. In training, sigma is an
    elementwise Bernoulli(keep) mask, drawn for each pair of members. In evaluation, sigma is the number
    `keep`. (The authors' code draws masks in evaluation, too, so its outputs vary.)

    The method is from Lee et al. 2017, "Confident Multiple Choice Learning", section 3.3.
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
    """Run all members up to their shared layers, mix the layers' outputs by `share`, and finish all runs.

    Each member's forward pass runs in a separate thread, which can pause. The threads run one at a time in
    a fixed order, so random numbers and communication are reproducible. A layer's output is a tensor, or a
    sequence that begins with a tensor.
    """
    runs = [_Run(forward, layer) for forward, layer in zip(members, layers, strict=True)]
    mixed = share([run.until_pause() for run in runs])
    return [run.to_end(h) for run, h in zip(runs, mixed, strict=True)]


class _Run:
    """A member's forward pass in a separate thread, which pauses after the shared layer."""

    def __init__(self, forward: Callable[[], Any], layer: nn.Module) -> None:
        self._forward, self._layer, self._has_paused = forward, layer, False
        # The queue contains the shared layer's output, and then the forward pass's result or error.
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._features: SimpleQueue[Tensor] = SimpleQueue()
        # A thread does not inherit torch modes such as no_grad, so `_work` sets the caller's modes.
        self._grad, kinds = torch.is_grad_enabled(), ("cpu", "cuda")
        self._casts = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def until_pause(self) -> Tensor:
        """Start the forward pass, and return the shared layer's output when the forward pass pauses."""
        threading.Thread(target=self._work, daemon=True).start()
        feature = self._next_event()
        if not self._has_paused:
            raise ValueError(f"--ensemble-share-after names a layer that a member does not call; {FIX}")
        return feature

    def to_end(self, feature: Tensor) -> Any:
        """Continue the forward pass with `feature` as the shared layer's output, and return the result."""
        self._features.put(feature)
        return self._next_event()

    def _next_event(self) -> Any:
        event = self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._layer.register_forward_hook(self._pause).remove)
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if self._device is not None:
                stack.enter_context(torch.cuda.device(self._device))
            try:
                result = self._forward()
            except Exception as error:
                result = error
        self._events.put(result)

    def _pause(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        if self._has_paused:
            raise ValueError(f"--ensemble-share-after names a layer that a member calls twice; {FIX}")
        self._has_paused = True
        self._events.put(output if torch.is_tensor(output) else output[0])
        mixed = self._features.get()
        return mixed if torch.is_tensor(output) else (mixed, *output[1:])
