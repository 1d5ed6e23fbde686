"""Generators: well-known collectives as plans. N ranks on n nodes of L; M bytes of a rank's `in`.

docs/plans.md has a table of the messages and rounds of each. A rank has one lane.

**Equal results.** One rank makes each sum, or all ranks make it in the same order: all get the same bits.

**Calls in a row** need no further signals. `tmp` alternates between calls. Except for broadcast and reduce,
a rank's result needs a part of each other rank's `in`. So a rank that ends a call has heard that all ranks
began it, and so ended the call before. A put to another rank's `out` follows a signal of the same call that
its owner has begun. In the second phase of all pairs and ring the first phase is that signal; all_gather's
ring and the trees send one first. A put from `in` or `out` is flushed, unless a later signal of its reader
makes that unnecessary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators.all_pairs import linear, one_phase, two_phase
from fairseq_tutel.plans.generators.nodes import hierarchical, two_hops
from fairseq_tutel.plans.generators.recursive import recursive_doubling, tree
from fairseq_tutel.plans.generators.ring import ring


class Generator(NamedTuple):
    """A function (collective, ranks, **options) -> Plan, its collectives and options."""

    function: Callable[..., Plan]
    collectives: tuple[str, ...]
    options: tuple[str, ...] = ()


_SUMS = ("all_gather", "reduce_scatter", "all_reduce")
GENERATORS = {
    "ring": Generator(ring, _SUMS),
    "recursive_doubling": Generator(recursive_doubling, _SUMS),
    "one_phase": Generator(one_phase, _SUMS),
    "two_phase": Generator(two_phase, ("all_reduce",)),
    "hierarchical": Generator(hierarchical, ("all_reduce",), ("nodes",)),
    "linear": Generator(linear, ("all_to_all",)),
    "two_hops": Generator(two_hops, ("all_to_all",), ("nodes",)),
    "tree": Generator(tree, ("broadcast", "reduce"), ("root",)),
}


def make(name: str, collective: str, ranks: int, *, nodes: int = 1, root: int = 0) -> Plan:
    """Make a plan by the name of its generator.

    Most generators ignore `nodes`, where rank = node * L + local rank; `root` is for broadcast and reduce.

    Raises:
        ValueError: there is no such plan.
    """
    if name not in GENERATORS:
        raise ValueError(f"There is no plan {name!r}; known are {', '.join(GENERATORS)}.")
    generator = GENERATORS[name]
    if collective not in generator.collectives:
        makes = " and ".join(generator.collectives)
        raise ValueError(f"{name} makes no {collective!r}: it makes {makes}.")
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be divided among {nodes} nodes.")
    if not 0 <= root < ranks:
        raise ValueError(f"The root {root} is none of {ranks} ranks.")
    given: dict[str, Any] = {"nodes": nodes, "root": root}
    options = {option: given[option] for option in generator.options}
    return generator.function(collective, ranks, **options)


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
