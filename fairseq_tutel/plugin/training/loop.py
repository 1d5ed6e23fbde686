"""Wraps functions of fairseq's training loop, and adds numbers to the sums that ranks compute."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fairseq_tutel.parallel import world


def globals_of(main: Any) -> dict[str, Any] | None:
    """Return the global names of fairseq's training loop if `main` is its main function, otherwise None.

    They are not read from the module of `main`: in a process that multiprocessing spawned for
    `python -m fairseq_cli.train`, the module has a copy of them.
    """
    names = getattr(main, "__globals__", {})
    module = getattr(names.get("__spec__"), "name", "")
    return names if module.startswith("fairseq_cli.") and "validate_and_save" in names else None


@contextlib.contextmanager
def wrapping(main: Any, **wrappers: Callable[[Any], Any]) -> Iterator[bool]:
    """Context manager that wraps functions that `main`, fairseq's main function, calls.

    A wrapper returns the wrapped form of the function, or class, of its name. The block gets whether `main`
    is fairseq's main function; otherwise nothing is wrapped.
    """
    names = globals_of(main)
    if names is None:
        yield False
        return
    before = {name: names[name] for name in wrappers}
    names.update({name: wrap(before[name]) for name, wrap in wrappers.items()})
    try:
        yield True
    finally:
        names.update(before)


class Votes:
    """Numbers that all ranks add up in each update, with the sums that fairseq computes for its log.

    So ranks agree on something after the same update without another collective; each number adds 8 bytes.

    Args:
        own: functions that return this rank's numbers, by name.
    """

    def __init__(self, **own: Callable[[], float]) -> None:
        self._own = own
        self._sums: dict[str, Any] = {}  # tensors on the device: they are read only on demand

    def join(self, trainer: Any) -> None:
        """Add the numbers to the sums of a Trainer."""
        original = trainer._aggregate_logging_outputs

        def aggregate(logging_outputs: Any, *extra: Any, ignore: bool = False) -> Any:
            own = [count() for count in self._own.values()]
            outputs, sums = original(logging_outputs, *extra, *own, ignore=ignore)
            self._sums = dict(zip(self._own, sums[len(extra) :], strict=True))
            return outputs, sums[: len(extra)]

        trainer._aggregate_logging_outputs = aggregate

    def total(self, name: str) -> float:
        """Return the sum of a number over all ranks at the latest update or validation step."""
        if world.size() == 1:
            return self._own[name]()
        return float(self._sums.get(name, 0.0))
