"""Generators make collective plans from well-known algorithms by name, and from trees (`forest`).

In a generated plan, each rank has one lane. All ranks get the same bits, because each sum is computed by
one rank, or by all ranks in the same order.

No signals are needed to report that `tmp` is free again, because `tmp` alternates between two buffers. A
rank's result needs data of every other rank's `in`. When a rank ends a call, all ranks have therefore begun
this call and ended the previous call, whose buffer is then free. A rank may put to another rank's `out`
only after the other rank has begun the call. In two-phase plans and ring all_reduce, a message of the first
phase shows that its sender has begun the call. In ring all_gather and in tree plans, a separate signal
shows this. A flush follows each put from `in` or `out`, unless a later signal from the receiver makes the
flush unnecessary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators import named


class Generator(NamedTuple):
    """A function that makes a plan from (collective, ranks), with the collectives that it supports.

    `has_nodes` is True if the function takes the option `nodes`.
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

    Rank node * L + i is the i-th of a node's L ranks. Only generators with `has_nodes` use `nodes`.

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
    """Return the fastest collective plans for the ranks of one host, each with its range of bytes.

    In these plans, each rank puts to all other ranks at once. For N > 2 ranks, an all_reduce above 2 MiB /
    N^2 is faster in two phases, because the data of a one-phase plan exceed a processor's cache. The
    command `benchmarks.collectives --all-plans` measured these plans with 2, 4 and 8 ranks.
    """
    if collective == "all_to_all":
        return (make("linear", collective, ranks),)
    one = make("one_phase", collective, ranks)
    if collective != "all_reduce" or ranks <= 2:
        return (one,)
    most = (2 << 20) // ranks**2
    two = make("two_phase", collective, ranks)
    return replace(one, max_bytes=most), replace(two, min_bytes=most + 1)
