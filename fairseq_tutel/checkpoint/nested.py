"""Walks nested dictionaries and lists out of a file, which may contain themselves."""

from collections.abc import Callable, Iterator
from typing import Any


def walk(tree: Any, opened: Callable[[Any], Any] = lambda node: node) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, key, value) of every entry at any depth, each container once.

    The key of a list's entry is its index. The caller may replace `container[key]` meanwhile.

    Args:
        tree: a dictionary, list or tuple; anything else has no entries.
        opened: turns a value of another type into a container; called for every value.
    """
    pending = [tree]
    visited: dict[int, Any] = {}  # holds the containers, so that no id is reused
    while pending:
        node = opened(pending.pop())
        if not isinstance(node, dict | list | tuple) or id(node) in visited:
            continue
        visited[id(node)] = node
        for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
            yield node, key, value
            pending.append(value)
