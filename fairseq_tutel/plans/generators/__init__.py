"""Well-known collectives as plans, by name. N ranks, of n nodes with L each, M bytes of a rank's `in`.

docs/plans.md has a table of what each sends, and in how many trips.

A rank has one lane. Everywhere a sum is made by one rank, or in one order by all: all hold the same bits.

**Two calls in a row** need nothing more, since `tmp` is another one in every second call: in all but
broadcast and reduce a rank's result needs something of everyone's `in`, so whoever is done with a call
knows that everyone began it, and was done with the one before. `out`, the caller's between calls, is
put into where a signal of the same call has said that its owner began (the second phase of the all-pairs
and of the ring), or its owner says so first (all_gather's ring and the trees).
What is put from `in` or `out` is flushed, unless a later signal of its reader says as much.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from fairseq_tutel.plans.format import KINDS, Plan
from fairseq_tutel.plans.generators.all_pairs import linear, one_phase, two_phase
from fairseq_tutel.plans.generators.nodes import hierarchical, two_hops
from fairseq_tutel.plans.generators.recursive import recursive_doubling, tree
from fairseq_tutel.plans.generators.ring import ring


class Generator(NamedTuple):
    """A function that makes plans.

    Attributes:
        function: (collective, ranks, kind=, …) -> Plan.
        collectives: those that it makes.
        options: what else it takes, `nodes` or `root`.
    """

    function: Callable[..., Plan]
    collectives: tuple[str, ...]
    options: tuple[str, ...] = ()


GENERATORS = {
    "ring": Generator(ring, ("all_gather", "reduce_scatter", "all_reduce")),
    "recursive_doubling": Generator(
        recursive_doubling, ("all_gather", "reduce_scatter", "all_reduce")
    ),
    "one_phase": Generator(one_phase, ("all_gather", "reduce_scatter", "all_reduce")),
    "two_phase": Generator(two_phase, ("all_reduce",)),
    "hierarchical": Generator(hierarchical, ("all_reduce",), ("nodes",)),
    "linear": Generator(linear, ("all_to_all",)),
    "two_hops": Generator(two_hops, ("all_to_all",), ("nodes",)),
    "tree": Generator(tree, ("broadcast", "reduce"), ("root",)),
}


def make(
    name: str, collective: str, ranks: int, *, nodes: int = 1, root: int = 0, kind: str = "simple"
) -> Plan:
    """Make a plan by its generator's name.

    Args:
        name: of `GENERATORS`.
        collective: one that it makes.
        ranks: N.
        nodes: n; rank = node * L + local. Those that know no nodes have no use for it.
        root: of broadcast and reduce.
        kind: of its channels.

    Raises:
        ValueError: there is no such plan; the sentence says why.
    """
    if name not in GENERATORS:
        raise ValueError(f"There is no plan {name!r}; known are {', '.join(GENERATORS)}.")
    generator = GENERATORS[name]
    if collective not in generator.collectives:
        makes = " and ".join(generator.collectives)
        raise ValueError(f"{name} makes no {collective!r}: it makes {makes}.")
    if kind not in KINDS:
        raise ValueError(f"There are no channels of kind {kind!r}; known are {', '.join(KINDS)}.")
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be shared out over {nodes} nodes.")
    if not 0 <= root < ranks:
        raise ValueError(f"The root {root} is none of {ranks} ranks.")
    given: dict[str, Any] = {"nodes": nodes, "root": root}
    options = {option: given[option] for option in generator.options}
    return generator.function(collective, ranks, kind=kind, **options)


def usual(collective: str, ranks: int) -> tuple[Plan, ...]:
    """Return the plans that are fastest between ranks of one host, each with the bytes that it is for.

    All ranks put to all at once. An all_reduce of more than two ranks does so in two phases when what one
    phase puts fits no processor's cache any more: from 2 MiB / N^2 on. Measured by
    `benchmarks.collectives --all-plans` with 2, 4 and 8 ranks.

    Raises:
        ValueError: there are none.
    """
    if collective == "all_to_all":
        return (make("linear", collective, ranks),)
    one = make("one_phase", collective, ranks)
    if collective != "all_reduce" or ranks <= 2:
        return (one,)
    most = (2 << 20) // ranks**2
    two = make("two_phase", collective, ranks)
    return replace(one, max_bytes=most), replace(two, min_bytes=most + 1)
