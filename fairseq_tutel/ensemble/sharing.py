"""Feature sharing between members of an ensemble: each forward pauses at one layer until all are there.

M members.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn


def shared(features_M: Sequence[Tensor], keep: float, training: bool) -> list[Tensor]:
    """Return h_m + the sum over the others m' of sigma * h_m', for every member m.

    sigma is elementwise Bernoulli(keep) in training, drawn for every pair, and its mean in evaluation.
    (The authors' code draws it in evaluation, too, so that outputs vary.)

    Source: Lee et al. 2017, "Confident Multiple Choice Learning", section 3.3.
    """
    if not training:
        all_of_them = torch.stack(list(features_M)).sum(dim=0)
        return [h + keep * (all_of_them - h) for h in features_M]
    mixed = []
    for m, h in enumerate(features_M):
        for i, other in enumerate(features_M):
            if i != m:
                h = h + other * torch.empty_like(other).bernoulli_(keep)
        mixed.append(h)
    return mixed


def run_and_share(
    members: Sequence[Callable[[], Any]],
    layers: Sequence[nn.Module],
    share: Callable[[list[Tensor]], list[Tensor]],
) -> list[Any]:
    """Run all members until their layer has its output, mix these by `share`, and run them to their end.

    Each forward runs in its own thread, since it must pause. Threads run one at a time in a fixed order, so
    that random numbers and communication are reproducible.

    Args:
        members: the forward of each.
        layers: the module of each where it pauses; its output is a tensor, or a sequence with one first.
        share: mixes the M tensors.

    Returns:
        The outputs of the members.
    """
    runs = [_Run(forward, layer) for forward, layer in zip(members, layers, strict=True)]
    try:
        mixed = share([run.until_pause() for run in runs])
        return [run.to_end(h) for run, h in zip(runs, mixed, strict=True)]
    finally:
        for run in runs:
            run.give_up()


class _GivenUpError(Exception):
    """Another member failed."""


class _Run:
    """A forward in a thread that pauses after one layer."""

    def __init__(self, forward: Callable[[], Any], layer: nn.Module) -> None:
        self._forward, self._layer = forward, layer
        self._events: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._features: SimpleQueue[Tensor | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(_modes(),), daemon=True)

    def until_pause(self) -> Tensor:
        """Start; return the layer's output."""
        self._thread.start()
        event, value = self._events.get()
        if event == "failed":
            raise value
        if event == "ended":
            raise ValueError(
                "a member's forward did not call the layer whose output is shared; name one in "
                "--ensemble-share-after that every forward calls."
            )
        return value

    def to_end(self, feature: Tensor) -> Any:
        """Continue with this as the layer's output; return the forward's result."""
        self._features.put(feature)
        event, value = self._events.get()
        if event == "failed":
            raise value
        if event == "paused":
            raise ValueError(
                "a member's forward calls the layer whose output is shared more than once; name "
                "another in --ensemble-share-after."
            )
        return value

    def give_up(self) -> None:
        """End the thread in any state."""
        if self._thread.is_alive():
            self._features.put(None)
            self._thread.join()

    def _work(self, set_modes: Callable[[], contextlib.AbstractContextManager]) -> None:
        handle = self._layer.register_forward_hook(self._pause)
        try:
            with set_modes():
                self._events.put(("ended", self._forward()))
        except _GivenUpError:
            pass
        except BaseException as error:
            self._events.put(("failed", error))
        finally:
            handle.remove()

    def _pause(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        feature = output[0] if isinstance(output, tuple | list) else output
        if not torch.is_tensor(feature):
            raise ValueError(
                f"the layer whose output is shared returns {type(feature).__name__}, no tensor; name "
                "another in --ensemble-share-after."
            )
        self._events.put(("paused", feature))
        mixed = self._features.get()
        if mixed is None:
            raise _GivenUpError
        return mixed if torch.is_tensor(output) else (mixed, *output[1:])


def _modes() -> Callable[[], contextlib.AbstractContextManager]:
    """Return a context manager that sets this thread's torch modes in another thread."""
    grad = torch.is_grad_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def set_modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
            yield

    return set_modes
