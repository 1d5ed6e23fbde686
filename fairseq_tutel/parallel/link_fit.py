"""Fits the links of a hardware profile to measured all-to-alls.

The fit minimizes the squared relative error of the predictions of `links`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np

from fairseq_tutel.parallel.links import exchange_seconds, regroup_seconds, terms
from fairseq_tutel.parallel.machine import Link, Machine

_ROUNDS = 30


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
    regroup = [regroup_seconds(row["bytes_per_rank"], start, row["algorithm"]) for row in rows]
    machine, guess = start, None
    for _ in range(_ROUNDS):
        columns = np.array([terms(*_arguments(row, machine)) for row in rows])
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
    scaled = columns[:, [0, *used]] / np.maximum(columns[:, [0, *used]].max(axis=0), 1e-300)
    has_full_rank = np.linalg.matrix_rank(scaled, tol=1e-6) == scaled.shape[1]
    found = _solve(columns, [0, *used] if has_full_rank else used, on_links, seconds)
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


def _solve(
    columns: np.ndarray, chosen: Sequence[int], targets: np.ndarray, seconds: np.ndarray
) -> dict[int, float]:
    """Return the non-negative coefficients of the chosen columns with the least squared relative error.

    Columns with negative coefficients get 0, one by one, the most negative column first.
    """
    scale, kept = np.maximum(columns.max(axis=0), 1e-300), list(chosen)
    while kept:
        weighted = columns[:, kept] / scale[kept] / seconds[:, None]
        found = np.linalg.lstsq(weighted, targets / seconds, rcond=None)[0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    fitted = {index: float(value / scale[index]) for index, value in zip(kept, found, strict=False)}
    return dict.fromkeys(chosen, 0.0) | fitted
