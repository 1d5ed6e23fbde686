"""Predicts the time of collectives by an alpha-beta model of links. There are N nodes with L ranks each."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction

from fairseq_tutel.parallel.machine import PRESETS, Machine
from fairseq_tutel.parallel.strategy import ALGORITHMS

# The amounts that are sent, by (source, target).
Load = Mapping[tuple[int, int], Fraction | int]


def exchange_seconds(
    bytes_per_rank: float,
    machine: Machine,
    nodes: int,
    local: int,
    algorithm: str,
    on_link: int | None = None,
) -> float:
    """Return the predicted seconds of an all-to-all with equal shares for all ranks.

    `bytes_per_rank` is the size of a rank's input, including the share that stays on this rank.
    """
    if nodes * local == 1:
        return 0.0
    launches, *of_links = terms(bytes_per_rank, machine, nodes, local, algorithm, on_link)
    return (
        launches * machine.launch_s
        + machine.intra.seconds(*of_links[:2])
        + machine.inter.seconds(*of_links[2:])
        + regroup_seconds(bytes_per_rank, machine, algorithm)
    )


def terms(
    bytes_per_rank: float, machine: Machine, nodes: int, local: int, algorithm: str, on_link: int | None
) -> list[float]:
    """Return five numbers that determine the time of an all-to-all.

    These are the launches, the messages and bytes within nodes, and the messages and bytes between nodes.
    """
    share = bytes_per_rank / (nodes * local)
    within, across = local - 1, (nodes - 1) * local
    sent_across = _on_link(machine, on_link or local) * across * share
    if algorithm == "2dh":
        return [2, within, within * nodes * share, nodes - 1, sent_across]
    # Linear uses both kinds of links at the same time, so the slower kind determines the time.
    if machine.intra.seconds(within, within * share) > machine.inter.seconds(across, sent_across):
        return [1, within, within * share, 0, 0]
    return [1, 0, 0, across, sent_across]


def regroup_seconds(bytes_per_rank: float, machine: Machine, algorithm: str) -> float:
    """Return the seconds for reordering rows in a 2-D hierarchical all-to-all; 0 for other algorithms.

    All rows are copied twice, and each copy reads and writes each byte.
    """
    return 4 * bytes_per_rank / machine.memory_bytes_per_s if algorithm == "2dh" else 0.0


def plan_seconds(loads: Iterable[Load], bytes_per_rank: float, machine: Machine, local: int) -> float:
    """Return the predicted seconds of a collective plan.

    `loads` has, for each round, the fraction of `bytes_per_rank` that is sent on each (source, target).
    """
    total = machine.launch_s
    for load in loads:
        slowest = 0.0
        for link, is_across in ((machine.intra, False), (machine.inter, True)):
            messages: Counter[int] = Counter()
            parts: dict[int, Fraction] = defaultdict(Fraction)
            for (source, target), part in load.items():
                if (source // local != target // local) == is_across:
                    messages[source] += 1
                    parts[source // local if is_across and machine.inter_shared else source] += part
            most = float(max(parts.values(), default=0)) * bytes_per_rank
            slowest = max(slowest, link.seconds(max(messages.values(), default=0), most))
        total += slowest
    return total


def faster_algorithm(machine: Machine | None, nodes: int, local: int, bytes_per_rank: float) -> str:
    """Return the faster all-to-all algorithm, linear or 2dh; linear if the two take equal time.

    Without a hardware profile, the profile of A100s is used.
    """
    known = machine or PRESETS["a100"]
    return min(ALGORITHMS, key=lambda a: exchange_seconds(bytes_per_rank, known, nodes, local, a))


def all_gather_seconds(
    num_bytes: float, machine: Machine, nodes: int, local: int, on_link: int | None = None
) -> float:
    """Return the predicted seconds of a ring all-gather, or of a ring reduce-scatter.

    `num_bytes` is the size of a rank's share. If the ranks of a node share one link to other nodes, the
    bytes of `on_link` ranks (default: L), in this group or other groups, add up on this link.
    """
    ranks = nodes * local
    if ranks == 1:
        return 0.0
    arriving = num_bytes * (ranks - local) / local * _on_link(machine, on_link or local)
    return (
        machine.launch_s
        + machine.intra.alpha_s * (ranks - nodes)
        + machine.inter.alpha_s * (nodes - 1)
        + max(
            num_bytes * (ranks - 1) / machine.intra.bytes_per_s if local > 1 else 0.0,
            arriving / machine.inter.bytes_per_s,
        )
    )


def all_reduce_seconds(
    num_bytes: float, machine: Machine, nodes: int, local: int, on_link: int | None = None
) -> float:
    """Return the predicted seconds of an all-reduce by a ring within nodes and a tree between nodes.

    The arguments are those of `all_gather_seconds`.
    """
    ranks = nodes * local
    if ranks == 1:
        return 0.0
    across = 2 * num_bytes * (nodes - 1) / nodes / local * _on_link(machine, on_link or local)
    within = 2 * num_bytes * (ranks - 1) / ranks
    return (
        machine.launch_s
        + machine.intra.alpha_s * 2 * (local - 1)
        + machine.inter.alpha_s * 2 * math.ceil(math.log2(nodes))
        + max(within / machine.intra.bytes_per_s if local > 1 else 0.0, across / machine.inter.bytes_per_s)
    )


def _on_link(machine: Machine, at_once: int) -> int:
    """Return the number of ranks that share one link between nodes if `at_once` ranks of a node send."""
    return at_once if machine.inter_shared else 1
