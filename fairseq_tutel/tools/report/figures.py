"""Draws the charts and heat maps of a report as SVG with matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

# The colors are the palette of Okabe and Ito, for color-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")
LINE_LETTERS = 70  # Characters per line of a legend, including gaps and line samples.
MOST_POINTS, MOST_COLUMNS = 400, 200  # Longer curves and wider heat maps are averaged.
FEW_POINTS = 40  # A curve with at most this many points is drawn with markers.


# All reports have the same colors. In heat maps, white means an even load.
LOAD_NORM = LogNorm(0.25, 4, clip=True)
LOAD_COLORS = matplotlib.colormaps["PuOr_r"].resampled(17)
LOAD_TICKS = {0.25: "≤ ¼", 0.5: "½", 1: "1", 2: "2", 4: "≥ 4"}

_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "figure.constrained_layout.use": True,
    # A dollar sign in the name of a run must not start a formula of matplotlib.
    "text.parse_math": False,
    # Text stays text in the SVG, and is shown in the reader's fonts. A fixed hashsalt makes the files of
    # equal charts equal.
    "svg.fonttype": "none",
    "svg.hashsalt": "fairseq_tutel",
}


@dataclass(frozen=True)
class Curve:
    """A curve in a line chart; `run` determines the curve's color, and `line` its line style."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    run: int = 0
    line: int = 0


@matplotlib.rc_context(_STYLE)
def line_chart(
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    from_zero: bool = False,
) -> str:
    """Return a line chart of several curves as SVG; values that are not finite are gaps.

    With `log`, the y axis of the chart is logarithmic if all values are positive.
    """
    figure = Figure(figsize=(5, 3.2))
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    _mark(axes.xaxis)
    for curve in curves:
        _draw(axes, curve)
    if log and all(value > 0 for curve in curves for value in curve.y):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    if from_zero:
        axes.set_ylim(bottom=0)
    labels = [c.label for c in curves]
    fitting = max(1, LINE_LETTERS // (max(map(len, labels)) + 7))
    lines = -(-len(labels) // fitting)
    figure.legend(loc="outside upper left", ncols=-(-len(labels) // lines), frameon=False, fontsize=9)
    return _svg(figure)


@matplotlib.rc_context(_STYLE | {"axes.grid": False})
def heat_map(updates: Sequence[int], loads_UE: Sequence[Sequence[float]]) -> str:
    """Return a heat map of expert loads as SVG, with a row for each expert and a column for each record.

    A column of the heat map shows averages over the updates since the previous record.
    """
    loads_EU = averaged(np.asarray(loads_UE, dtype=float).T, MOST_COLUMNS)
    right = np.asarray(updates, dtype=float)
    step = -(-len(right) // MOST_COLUMNS)
    first = 2 * right[0] - right[1] if len(right) > 1 else 0
    edges = np.concatenate([[max(first, 0)], right[step - 1 :: step]])
    if len(edges) == loads_EU.shape[1]:  # The last column may have fewer records.
        edges = np.append(edges, right[-1])
    figure = Figure(figsize=(4, 2.7))
    axes = figure.add_subplot(xlabel="updates", ylabel="expert")
    mesh = axes.pcolormesh(
        edges,
        np.arange(len(loads_EU) + 1) - 0.5,
        loads_EU,
        norm=LOAD_NORM,
        cmap=LOAD_COLORS,
        rasterized=True,
    )
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.invert_yaxis()
    _mark(axes.xaxis)
    bar = figure.colorbar(mesh, label="load, even shares")
    bar.set_ticks([*LOAD_TICKS], labels=[*LOAD_TICKS.values()])
    bar.minorticks_off()
    return _svg(figure)


def averaged(values: np.ndarray, count: int) -> np.ndarray:
    """Shorten the last axis to at most `count` values by averaging neighboring finite values."""
    values = np.where(np.isfinite(values), values, np.nan)
    step = -(-values.shape[-1] // count)
    if step <= 1:
        return values
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % step)]
    blocks = np.pad(values, padding, constant_values=np.nan)
    blocks = blocks.reshape(*values.shape[:-1], -1, step)
    seen = np.isfinite(blocks).sum(axis=-1)
    return np.where(seen > 0, np.nansum(blocks, axis=-1) / np.maximum(seen, 1), np.nan)


def _draw(axes: Axes, curve: Curve) -> None:
    x, y = (averaged(np.asarray(values, dtype=float), MOST_POINTS) for values in (curve.x, curve.y))
    axes.plot(
        x,
        y,
        label=f" {curve.label}",  # Legends omit labels that begin with _.
        color=COLORS[curve.run % len(COLORS)],
        linestyle=LINES[curve.line % len(LINES)],
        linewidth=1.4,
        marker="o" if len(x) <= FEW_POINTS else None,
        markersize=3,
    )


def _mark(axis: Axis) -> None:
    """Set a small number of ticks with short labels, such as 150k, on a chart's axis."""
    axis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_major_formatter(EngFormatter(sep=""))


def _svg(figure: Figure) -> str:
    file = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", dpi=110, metadata=nothing)
    return file.getvalue()
