"""Delay of every message to another node, emulated in the sender.

The kernel's own emulation (netem) is not everywhere. Here a rank sleeps before it sends, once for every
other node's rank that it has something for: it is the sender that is busy, as with a network card's
overhead for a message, and a link that is long but not busy would cost less.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def delayed_messages(seconds: float, local: int) -> Iterator[None]:
    """Let every all-to-all, all-gather and reduce-scatter wait before it sends.

    Args:
        seconds: for each message to another node.
        local: L, ranks of a node.
    """
    with ExitStack() as patches:
        if seconds:
            for name in ("all_to_all_single", "all_gather", "reduce_scatter"):
                function = _delayed(getattr(dist, name), seconds, local)
                patches.enter_context(patch.object(dist, name, function))
        yield


def num_remote(ranks: list[int], rank: int, local: int, send_counts: list[int] | None = None) -> int:
    """Return how many messages go to other nodes: one to each rank there that gets something."""
    counts = [1] * len(ranks) if send_counts is None else send_counts
    pairs = zip(ranks, counts, strict=True)
    return sum(other // local != rank // local and count > 0 for other, count in pairs)


def _delayed(collective: Callable[..., Any], seconds: float, local: int) -> Callable[..., Any]:
    def send(
        out: Any,
        given: Any,
        receive_counts: list[int] | None = None,
        send_counts: list[int] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Any:
        ranks = dist.get_process_group_ranks(group)
        time.sleep(seconds * num_remote(ranks, dist.get_rank(), local, send_counts))
        splits = () if send_counts is None else (receive_counts, send_counts)
        return collective(out, given, *splits, group=group, **options)

    return send
