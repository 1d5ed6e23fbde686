"""Links: seconds of collectives by an alpha-beta model, and links fitted to measurements.

N nodes of L ranks. The fit minimizes the squared relative error.
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
# Amounts by (source, target).
Load = Mapping[tuple[int, int], Fraction | int]


def exchange_seconds(
    bytes_per_rank: float,
    machine: Machine,
    nodes: int,
    local: int,
    algorithm: str,
    on_link: int | None = None,
) -> float:
    """Return the seconds of one even all-to-all of inputs that include a rank's own share."""
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
    """Return an all-to-all's launches, messages and bytes within nodes, messages and bytes across."""
    share = bytes_per_rank / (nodes * local)
    within, across = local - 1, (nodes - 1) * local
    sent_across = _on_link(machine, on_link or local) * across * share
    if algorithm == "2dh":
        return [2, within, within * nodes * share, nodes - 1, sent_across]
    # Linear: both kinds of link work at once, and the slower one counts.
    if machine.intra.seconds(within, within * share) > machine.inter.seconds(across, sent_across):
        return [1, within, within * share, 0, 0]
    return [1, 0, 0, across, sent_across]


def _regroup_seconds(bytes_per_rank: float, machine: Machine, algorithm: str) -> float:
    """Return the seconds of 2DH to copy rows into another order, twice: each byte is read and written."""
    return 4 * bytes_per_rank / machine.memory_bytes_per_s if algorithm == "2dh" else 0.0


def plan_seconds(loads: Iterable[Load], bytes_per_rank: float, machine: Machine, local: int) -> float:
    """Return the seconds of a plan; `loads` are each round's fractions of the bytes by (source, target)."""
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
    """Return the faster all-to-all algorithm, by default on A100s; linear if both are equal."""
    known = machine or PRESETS["a100"]
    return min(ALGORITHMS, key=lambda a: exchange_seconds(bytes_per_rank, known, nodes, local, a))


def all_gather_seconds(
    num_bytes: float, machine: Machine, nodes: int, local: int, on_link: int | None = None
) -> float:
    """Return the seconds of a ring all-gather, or of a ring reduce-scatter, of a rank's input.

    The bytes of `on_link` ranks of a node, of this group or others (default: L), add up on a shared link.
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
    """Return the seconds of an all-reduce: a ring within nodes, a tree across; see `all_gather_seconds`."""
    ranks = nodes * local
    if ranks == 1:
        return 0.0
    across = 2 * num_bytes * (nodes - 1) / nodes / local * _on_link(machine, on_link or local)
    within = 2 * num_bytes * (ranks - 1) / ranks
    return (
        machine.launch_s
        + machine.intra.alpha_s * 2 * (local - 1)
        + machine.inter.alpha_s * 2 * math.ceil(math.log2(nodes))
        + max(
            within / machine.intra.bytes_per_s if local > 1 else 0.0,
            across / machine.inter.bytes_per_s,
        )
    )


def _on_link(machine: Machine, at_once: int) -> int:
    """Return the number of ranks that share one link between nodes, if `at_once` of a node send."""
    return at_once if machine.inter_shared else 1


class Row(TypedDict):
    """One measured all-to-all."""

    nodes: int
    local: int
    algorithm: str
    bytes_per_rank: float  # of the input, including the rank's own share
    seconds: float
    on_link: NotRequired[int]  # ranks of a node that did the same at once; default: `local`


class Errors(NamedTuple):
    """Relative errors of a model, each |predicted / measured - 1|."""

    median: float
    p90: float
    largest: float


def fit_machine(rows: Sequence[Row], start: Machine) -> Machine:
    """Return `start` with the links and launch time that fit the rows best.

    A linear all-to-all is bounded by one kind of link, which each round determines by the links of the
    previous one. Links that the rows do not determine stay those of `start`. If launch and alpha cannot be
    separated, the launch is 0. ValueError: the rows do not determine the seconds of a byte.
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
    """Return the predicted seconds of an all-to-all."""
    return exchange_seconds(*_arguments(row, machine))


def relative_errors(rows: Sequence[Row], machine: Machine) -> Errors:
    """Return the errors of a hardware profile on measured rows."""
    return errors_of((predicted(row, machine), row["seconds"]) for row in rows)


def errors_of(pairs: Iterable[tuple[float, float]]) -> Errors:
    """Return the errors of (predicted, measured) seconds."""
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
            "the measured all-to-alls take no longer with more bytes; measure larger messages."
        )
    return replace(
        start,
        launch_s=found.get(0, 0.0),
        intra=_link(found.get(1), found.get(2), start.intra),
        inter=_link(found.get(3), found.get(4), start.inter),
    )


def _link(alpha: float | None, per_byte: float | None, start: Link) -> Link:
    """Return the fitted link; numbers that were not determined are those of `start`."""
    return Link(start.alpha_s if alpha is None else alpha, 1 / per_byte if per_byte else start.bytes_per_s)


def _solve(columns: np.ndarray, targets: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the coefficients of the least relative errors, none below 0.

    Columns with negative coefficients are left out, the most negative first.
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
