"""Wraps functions of fairseq's training loop."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def globals_of(main: Any) -> dict[str, Any] | None:
    """Return the global names of fairseq's training loop if `main` is its main function, otherwise None.

    The names must not be read from the module of `main`: in a process that multiprocessing spawned for
    `python -m fairseq_cli.train`, the module only has copies of the names.
    """
    names = getattr(main, "__globals__", {})
    module = getattr(names.get("__spec__"), "name", "")
    return names if module.startswith("fairseq_cli.") and "validate_and_save" in names else None


@contextlib.contextmanager
def wrapping(main: Any, **wrappers: Callable[[Any], Any]) -> Iterator[None]:
    """Context manager that wraps functions that `main` calls, if it is fairseq's main function.

    The name of an argument is the name of a function or class; its value is a function that wraps it.
    """
    names = globals_of(main) or {}
    before = {name: names[name] for name in wrappers if names}
    names.update({name: wrappers[name](stock) for name, stock in before.items()})
    try:
        yield
    finally:
        names.update(before)
