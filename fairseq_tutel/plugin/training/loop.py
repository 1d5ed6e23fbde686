"""Wraps functions of fairseq's training loop, and adds numbers to the sums that ranks compute."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from fairseq_tutel.ranks import world


def module_of(main: Any) -> ModuleType | None:
    """Return the module with fairseq's training loop if `main` is its main function, otherwise None."""
    module = sys.modules.get(getattr(main, "__module__", ""))
    # `python -m fairseq_cli.train` runs the module under another name.
    name = getattr(getattr(module, "__spec__", None), "name", "")
    return module if name.startswith("fairseq_cli.") and hasattr(module, "train") else None


@contextlib.contextmanager
def wrapping(
    main: Any,
    train: Callable[[Any], Any] = lambda original: original,
    validate_and_save: Callable[[Any], Any] = lambda original: original,
) -> Iterator[bool]:
    """Context manager that wraps functions in the module of `main`, fairseq's main function.

    `train` and `validate_and_save` return the wrapped form of the function of their name. The block gets
    whether `main` is fairseq's main function; otherwise nothing is wrapped.
    """
    module: Any = module_of(main)
    if module is None:
        yield False
        return
    before = module.train, module.validate_and_save
    module.train, module.validate_and_save = train(before[0]), validate_and_save(before[1])
    try:
        yield True
    finally:
        module.train, module.validate_and_save = before


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
