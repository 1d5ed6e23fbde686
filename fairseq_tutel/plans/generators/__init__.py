"""Generators: well-known collectives as plans, and ForestColl's trees (`forest`).

A rank has one lane.

One rank makes each sum, or all ranks make it in the same order: all get the same bits.

Calls in a row need no further signals. `tmp` alternates between calls. A rank's result needs a part of each
other rank's `in`. So a rank that ends a call has heard that all ranks began it, and so ended the call
before. A put to another rank's `out` follows a signal of the same call that its owner has begun. In the
second phase of all pairs and ring the first phase is that signal; all_gather's ring and the trees send one
first. A put from `in` or `out` is flushed, unless a later signal of its reader makes that unnecessary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators import named


class Generator(NamedTuple):
    """A function (collective, ranks) -> Plan, its collectives, and whether it has the option `nodes`."""

    function: Callable[..., Plan]
    collectives: tuple[str, ...]
    has_nodes: bool = False


_SUMS = ("all_gather", "reduce_scatter", "all_reduce")
GENERATORS = {
    "ring": Generator(named.ring, _SUMS),
    "recursive_doubling": Generator(named.recursive_doubling, _SUMS),
    "one_phase": Generator(named.all_pairs, _SUMS),
    "two_phase": Generator(named.two_phase, ("all_reduce",)),
    "hierarchical": Generator(named.hierarchical, ("all_reduce",), has_nodes=True),
    "linear": Generator(named.all_pairs, ("all_to_all",)),
    "two_hops": Generator(named.two_hops, ("all_to_all",), has_nodes=True),
}


def make(name: str, collective: str, ranks: int, *, nodes: int = 1) -> Plan:
    """Make a plan by the name of its generator.

    Most generators ignore `nodes`, where rank = node * L + local rank.

    Raises:
        ValueError: there is no such plan.
    """
    if name not in GENERATORS:
        raise ValueError(f"There is no plan {name!r}; known are {', '.join(GENERATORS)}.")
    function, collectives, has_nodes = GENERATORS[name]
    if collective not in collectives:
        raise ValueError(f"{name} makes no {collective!r}: it makes {' and '.join(collectives)}.")
    if ranks < 2:
        raise ValueError(f"A plan has 2 ranks or more, not {ranks}.")
    if nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be divided among {nodes} nodes.")
    return function(collective, ranks, nodes=nodes) if has_nodes else function(collective, ranks)


def usual(collective: str, ranks: int) -> tuple[Plan, ...]:
    """Return the fastest plans between ranks of one host, each with its range of bytes.

    All ranks put to all at once. An all_reduce of more than two ranks needs two phases when the data of one
    phase no longer fits a processor's cache: above 2 MiB / N^2. Measured by
    `benchmarks.collectives --all-plans` with 2, 4 and 8 ranks.
    """
    if collective == "all_to_all":
        return (make("linear", collective, ranks),)
    one = make("one_phase", collective, ranks)
    if collective != "all_reduce" or ranks <= 2:
        return (one,)
    most = (2 << 20) // ranks**2
    two = make("two_phase", collective, ranks)
    return replace(one, max_bytes=most), replace(two, min_bytes=most + 1)
