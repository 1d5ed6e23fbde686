"""Members of an ensemble give each other their features: each pauses at one layer until all are there.

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

    sigma is elementwise Bernoulli(keep) while training, drawn for every pair, and its mean in evaluation.
    (The authors' code draws it in evaluation, too, which makes an output another one each time.)

    Args:
        features_M: M tensors of one shape.
        keep: probability of a 1.
        training: the members' mode.

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
    """Run all members until their layer has its output, let `share` mix these, and run them to their end.

    A forward has to stop in its midst, so each runs in a thread of its own; but one at a time, in order:
    what members draw or send is the same each time.

    Args:
        members: the forward of each.
        layers: the module of each where it pauses; its output is a tensor, or begins with one.
        share: of the M tensors.

    Returns:
        What each member returned.

    Raises:
        ValueError: a forward went past its layer, or through it twice.
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
    """A forward that pauses where its layer has its output."""

    def __init__(self, forward: Callable[[], Any], layer: nn.Module) -> None:
        self._forward, self._layer = forward, layer
        self._said: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._told: SimpleQueue[Tensor | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(_modes(),), daemon=True)

    def until_pause(self) -> Tensor:
        """Begin; return the layer's output."""
        self._thread.start()
        said, value = self._said.get()
        if said == "failed":
            raise value
        if said == "ended":
            raise ValueError(
                "a member's forward did not come through the layer whose output is to be shared; name one "
                "in --ensemble-share-after that every forward calls."
            )
        return value

    def to_end(self, feature: Tensor) -> Any:
        """Go on with this as the layer's output; return what the forward returns."""
        self._told.put(feature)
        said, value = self._said.get()
        if said == "failed":
            raise value
        if said == "paused":
            raise ValueError(
                "a member's forward calls the layer whose output is to be shared more than once; name "
                "another in --ensemble-share-after."
            )
        return value

    def give_up(self) -> None:
        """End the thread, wherever it is."""
        if self._thread.is_alive():
            self._told.put(None)
            self._thread.join()

    def _work(self, set_modes: Callable[[], contextlib.AbstractContextManager]) -> None:
        handle = self._layer.register_forward_hook(self._pause)
        try:
            with set_modes():
                self._said.put(("ended", self._forward()))
        except _GivenUpError:
            pass
        except BaseException as error:
            self._said.put(("failed", error))
        finally:
            handle.remove()

    def _pause(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        feature = output[0] if isinstance(output, tuple | list) else output
        if not torch.is_tensor(feature):
            raise ValueError(
                f"the layer whose output is to be shared returns {type(feature).__name__}, no tensor; name "
                "another in --ensemble-share-after."
            )
        self._said.put(("paused", feature))
        told = self._told.get()
        if told is None:
            raise _GivenUpError
        return told if torch.is_tensor(output) else (told, *output[1:])


def _modes() -> Callable[[], contextlib.AbstractContextManager]:
    """Return what sets, in another thread, the modes that torch keeps for each."""
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
