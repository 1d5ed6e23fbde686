"""Wraps functions that fairseq's training loop calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def globals_of(main: Any) -> dict[str, Any] | None:
    """Return the globals of fairseq's training loop if `main` is its training function, otherwise None.

    In a process that multiprocessing spawned for `python -m fairseq_cli.train`, the module of `main` has
    only copies of the globals, so `main.__globals__` is returned.
    """
    names = getattr(main, "__globals__", {})
    module = getattr(names.get("__spec__"), "name", "")
    return names if module.startswith("fairseq_cli.") and "validate_and_save" in names else None


@contextlib.contextmanager
def wrapping(main: Any, **wrappers: Callable[[Any], Any]) -> Iterator[None]:
    """Context manager that wraps functions that `main` calls, if `main` is fairseq's training function.

    Each keyword argument maps the name of a function or class to a function that wraps it.
    """
    names = globals_of(main) or {}
    before = {name: names[name] for name in wrappers if names}
    names.update({name: wrappers[name](stock) for name, stock in before.items()})
    try:
        yield
    finally:
        names.update(before)
