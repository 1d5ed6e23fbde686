"""Generators of collective plans: well-known algorithms by name, and ForestColl's trees (`forest`).

Each rank has one lane. All ranks get the same bits, because each sum is made by one rank, or by all ranks
in the same order.

Calls in a row need no extra signals, because `tmp` alternates between calls. A rank's result needs a part
of each other rank's `in`. So when a rank ends a call, all ranks have begun this call and ended the previous
one. Before a put to another rank's `out`, that rank must signal that it has begun the call. In two-phase
plans and in ring all_reduce, the first phase is this signal. The ring all_gather and the trees send it. A
put from `in` or `out` is flushed, unless a later signal from the receiver makes the flush unnecessary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators import named


class Generator(NamedTuple):
    """A function that makes a plan from (collective, ranks), and the collectives that it supports.

    `has_nodes`: whether the function takes the option `nodes`.
    """

    function: Callable[..., Plan]
    collectives: tuple[str, ...]
    has_nodes: bool = False


_SUMS = ("all_gather", "reduce_scatter", "all_reduce")
GENERATORS = {
    "ring": Generator(named.ring, _SUMS),
    "one_phase": Generator(named.all_pairs, _SUMS),
    "two_phase": Generator(named.two_phase, ("all_reduce",)),
    "hierarchical": Generator(named.hierarchical, ("all_reduce",), has_nodes=True),
    "linear": Generator(named.all_pairs, ("all_to_all",)),
    "two_hops": Generator(named.two_hops, ("all_to_all",), has_nodes=True),
}


def make(name: str, collective: str, ranks: int, *, nodes: int = 1) -> Plan:
    """Make a collective plan with the generator `name`.

    Ranks are numbered node * L + local rank. Most generators ignore `nodes`.

    Raises:
        ValueError: the generator is unknown, or cannot make a plan for these arguments.
    """
    if name not in GENERATORS:
        raise ValueError(f"There is no plan {name!r}; give one of {', '.join(GENERATORS)}.")
    function, collectives, has_nodes = GENERATORS[name]
    if collective not in collectives:
        raise ValueError(f"{name} cannot make {collective!r} plans; give {' or '.join(collectives)}.")
    if ranks < 2:
        raise ValueError(f"A plan needs at least 2 ranks, but {ranks} was given.")
    if nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be divided equally among {nodes} nodes.")
    return function(collective, ranks, nodes=nodes) if has_nodes else function(collective, ranks)


def usual(collective: str, ranks: int) -> tuple[Plan, ...]:
    """Return the fastest collective plans for ranks on one host, each with its range of bytes.

    All ranks put to all others at once. For more than two ranks, an all_reduce is faster in two phases if
    the data of one phase does not fit a processor's cache, which is above 2 MiB / N^2. Measured by
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
