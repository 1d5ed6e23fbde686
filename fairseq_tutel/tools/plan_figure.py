"""Draw plans with matplotlib: the step of each as a bar of its parts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fairseq_tutel.planning.cost import Plan

_STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw(plans: Mapping[str, Plan], title: str, path: Path) -> None:
    """Write a picture of the plans, the first on top; the file's ending says its format.

    Raises:
        OSError: the file can not be written.
    """
    parts = list(next(iter(plans.values())).parts)
    colors = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 1.6 + 0.32 * len(plans)), layout="constrained")
        axes = figure.add_subplot(xlabel="milliseconds of a step", title=title)
        names = list(plans)
        left = [0.0] * len(names)
        for part, color in zip(parts, colors, strict=False):
            widths = [1e3 * plans[name].parts[part] for name in names]
            axes.barh(names, widths, left=left, color=color, label=part, height=0.7)
            left = [sum(pair) for pair in zip(left, widths, strict=True)]
        for index, name in enumerate(names):
            note = "" if plans[name].fits else ", does not fit"
            axes.annotate(
                f"{left[index]:.1f} ms, {plans[name].bytes / 1e9:.1f} GB{note}",
                (left[index], index),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_xlim(right=1.35 * max(left))
        axes.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=110)
