"""Predicts the time of collectives by an alpha-beta model of links, and fits this model to measurements.

There are N nodes with L ranks each. The fit minimizes the squared relative error.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np

from fairseq_tutel.planning.machine import PRESETS, Link, Machine
from fairseq_tutel.planning.strategy import ALGORITHMS

_ROUNDS = 30
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
    launches, *of_links = _terms(bytes_per_rank, machine, nodes, local, algorithm, on_link)
    return (
        launches * machine.launch_s
        + machine.intra.seconds(*of_links[:2])
        + machine.inter.seconds(*of_links[2:])
        + _regroup_seconds(bytes_per_rank, machine, algorithm)
    )


def _terms(
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


def _regroup_seconds(bytes_per_rank: float, machine: Machine, algorithm: str) -> float:
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


class Row(TypedDict):
    """A measurement of one all-to-all: its shape, its size and its time."""

    nodes: int
    local: int
    algorithm: str
    bytes_per_rank: float  # the size of the input, including the rank's own share
    seconds: float
    on_link: NotRequired[int]  # ranks of a node that ran an all-to-all at once; default: `local`


class Errors(NamedTuple):
    """The median, 90th percentile and maximum of relative errors |predicted / measured - 1|."""

    median: float
    p90: float
    largest: float


def fit_machine(rows: Sequence[Row], start: Machine) -> Machine:
    """Fit the links and the launch time of a hardware profile to measured all-to-alls.

    One kind of link bounds a linear all-to-all. Each round of the fit finds this kind with the links of the
    previous round. Links that the rows do not determine are kept from `start`. If launch time and alpha
    cannot be separated, the launch time is 0.

    Raises:
        ValueError: there are no rows, or they do not determine the seconds per byte.
    """
    if not rows:
        raise ValueError("there is no measured all-to-all to fit; measure one.")
    seconds = np.array([row["seconds"] for row in rows])
    regroup = [_regroup_seconds(row["bytes_per_rank"], start, row["algorithm"]) for row in rows]
    machine, guess = start, None
    for _ in range(_ROUNDS):
        columns = np.array([_terms(*_arguments(row, machine)) for row in rows])
        if guess is not None and np.array_equal(columns, guess):
            break
        guess = columns
        machine = _machine_of(columns, seconds - regroup, seconds, start)
    return machine


def predicted(row: Row, machine: Machine) -> float:
    """Return the predicted seconds of a measured all-to-all on a machine with this hardware profile."""
    return exchange_seconds(*_arguments(row, machine))


def relative_errors(rows: Sequence[Row], machine: Machine) -> Errors:
    """Return the relative errors of a hardware profile's predictions for measured all-to-alls."""
    return errors_of((predicted(row, machine), row["seconds"]) for row in rows)


def errors_of(pairs: Iterable[tuple[float, float]]) -> Errors:
    """Return the relative errors of pairs (predicted seconds, measured seconds)."""
    errors = [abs(predicted_s / measured_s - 1) for predicted_s, measured_s in pairs]
    return Errors(median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9)), largest=max(errors))


def _arguments(row: Row, machine: Machine) -> tuple[float, Machine, int, int, str, int | None]:
    shape = row["nodes"], row["local"], row["algorithm"], row.get("on_link")
    return row["bytes_per_rank"], machine, *shape


def _machine_of(columns: np.ndarray, on_links: np.ndarray, seconds: np.ndarray, start: Machine) -> Machine:
    used = [i for kind in ((1, 2), (3, 4)) if columns[:, kind[1]].any() for i in kind]
    with_launch = columns[:, [0, *used]]
    scaled = with_launch / np.maximum(np.abs(with_launch).max(axis=0), 1e-300)
    has_full_rank = np.linalg.matrix_rank(scaled, tol=1e-6) == scaled.shape[1]
    chosen = [0, *used] if has_full_rank else used
    found = dict(zip(chosen, _solve(columns[:, chosen], on_links, seconds), strict=True))
    if max(found.get(2, 0.0), found.get(4, 0.0)) <= 0:
        raise ValueError(
            "the measured all-to-alls do not take longer with more bytes; measure larger messages."
        )
    return replace(
        start,
        launch_s=found.get(0, 0.0),
        intra=_link(found.get(1), found.get(2), start.intra),
        inter=_link(found.get(3), found.get(4), start.inter),
    )


def _link(alpha: float | None, per_byte: float | None, start: Link) -> Link:
    """Return a link's fitted latency and speed; a number that was not fitted is taken from `start`."""
    return Link(start.alpha_s if alpha is None else alpha, 1 / per_byte if per_byte else start.bytes_per_s)


def _solve(columns: np.ndarray, targets: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the non-negative coefficients that minimize the squared relative errors.

    Columns with negative coefficients are removed one by one, the most negative column first.
    """
    weights = 1 / seconds
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    kept = list(range(columns.shape[1]))
    result = [0.0] * columns.shape[1]
    while kept:
        weighted = columns[:, kept] / scale[kept] * weights[:, None]
        found = np.linalg.lstsq(weighted, targets * weights, rcond=None)[0]
        if found.min() >= 0:
            for index, value in zip(kept, found, strict=True):
                result[index] = float(value / scale[index])
            break
        kept.pop(int(found.argmin()))
    return result
