"""Writes the tables and pictures of docs/scaling.md, from the cost model and benchmarks/results.

`python docs/make_scaling.py` rewrites the page; --check only reports whether the tables are up to date.
"""

import json
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

import forms
import page
from fairseq_tutel.parallel.cost import Cluster, Work, best, candidates, step_seconds
from fairseq_tutel.parallel.links import exchange_seconds
from fairseq_tutel.parallel.machine import PRESETS
from fairseq_tutel.parallel.strategy import Strategy
from fairseq_tutel.tools.report.figures import COLORS

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "scaling.md"
RESULTS = DOCS.parent / "benchmarks" / "results"

A100 = PRESETS["a100"]
LOCAL = 8
GPUS = [8 * 2**n for n in range(12)]  # cluster sizes: 8 to 16,384 GPUs
SIZES_MIB = (1 / 16, 1, 8, 32, 256)
# A layer with exchanges of 32 MiB per rank. The layer has fewer experts than GPUs on 128 GPUs or more.
LAYER = Work(tokens=4096, model_dim=2048, hidden_dim=8192, experts=64)
# A layer with large experts, for which gathering weights and sending tokens cost about the same.
LARGE_LAYER = Work(tokens=4096, model_dim=4096, hidden_dim=32768, experts=64)
TOKENS = [2**n for n in range(5, 18)]
# The paper's 3^5 settings for pipelining: experts per GPU, D, H, tokens per GPU, number of GPUs.
PAPER_GRID = (
    (0.5, 1, 2),
    (1024, 2048, 4096),
    (1024, 2048, 4096),
    (4096, 16384, 65536),
    (16, 64, 256),
)


def main() -> None:
    """Rewrite or check docs/scaling.md."""
    if page.run(PAGE, filled_in, __doc__):
        draw_algorithms(DOCS / "scaling_2dh.png")
        draw_sizes(DOCS / "scaling_sizes.png")
        draw_parallelism(DOCS / "scaling_r.png")


def filled_in(text: str) -> str:
    """Return the text of docs/scaling.md with new tables."""
    tables = {
        "forms": forms.forms_table(),
        "presets": presets_table(),
        "2dh": algorithms_table(),
        "paper": paper_table(),
        "schedule": schedule_table(json.loads((RESULTS / "schedule.json").read_text())),
        "collectives": collectives_table(json.loads((RESULTS / "cluster.json").read_text())),
    }
    return page.filled(text, PAGE.name, tables)


def presets_table() -> str:
    """Return the table of the bandwidths, memory and FLOP/s of each GPU preset."""
    rows = [
        [
            f"`{key}`",
            f"{m.intra.bytes_per_s / 1e9:.0f}",
            f"{m.inter.bytes_per_s / 1e9:.1f}",
            f"{m.memory_bytes_per_s / 1e9:.0f}",
            f"{m.flops_per_s / 1e12:.0f}",
            f"{m.gate_flops_per_s / 1e12:.1f}",
            f"{m.memory_bytes / 1e9:.0f}",
        ]
        for key, m in PRESETS.items()
    ]
    header = ["--gpu", "within a node, GB/s", "to other nodes, GB/s", "memory, GB/s", "experts, TFLOP/s",
              "gate, TFLOP/s", "memory, GB"]  # fmt: skip
    return page.table(rows, header)


def gain_of_2dh(gpus: int, mebibytes: float) -> float:
    """Return the time of the linear all-to-all over all A100s, divided by that of 2DH."""
    linear, hierarchical = (
        exchange_seconds(mebibytes * 2**20, A100, gpus // LOCAL, LOCAL, a) for a in ("linear", "2dh")
    )
    return linear / hierarchical


def algorithms_table() -> str:
    """Return the table that compares linear and 2DH by cluster size and message size."""
    rows = [[f"{gpus:,}", *(f"{gain_of_2dh(gpus, size):.2f}" for size in SIZES_MIB)] for gpus in GPUS[1::2]]
    return page.table(rows, ["A100s", *(f"{_size(size)} a rank" for size in SIZES_MIB)])


def choices(work: Work, gpus: int) -> dict[Strategy, float]:
    """Return the predicted seconds of every strategy, for a layer with experts on all GPUs."""
    cluster = Cluster(nodes=gpus // LOCAL, local=LOCAL, expert_parallel_size=gpus)
    strategies = {strategy for c, strategy in candidates(work, gpus // LOCAL, LOCAL) if c == cluster}
    return {strategy: step_seconds(work, A100, cluster, strategy) for strategy in strategies}


def gains(work: Work, gpus: int) -> dict[str, float]:
    """Return the predicted speedup of the best strategy over each static strategy.

    For the entries about r, only r changes; d is 1 and the algorithm is linear. For the entry about d and
    linear, r is 1.
    """
    times = choices(work, gpus)
    plain = {r: times[Strategy(adaptive_r=r)] for r in {strategy.adaptive_r for strategy in times}}
    overlapped = [s for strategy, s in times.items() if strategy.adaptive_r == 1]
    return {
        "over r = 1": plain[1] / min(plain.values()),
        "over r = 0": plain[0] / min(plain.values()),
        "over r = s": plain[max(plain)] / min(plain.values()),
        "over d = 1, linear": times[Strategy()] / min(overlapped),
    }


def paper_table() -> str:
    """Return the table that compares speedups of the paper with those of the cost model."""
    grid = [
        gains(Work(tokens=t, model_dim=d, hidden_dim=h, experts=round(e * w)), w)
        for e, d, h, t, w in product(*PAPER_GRID)
    ]
    large = [
        gains(Work(tokens=t, model_dim=2048, hidden_dim=8192, experts=e), w)
        for e, t, w in product((64, 512, 2048), (512, 4096, 32768), (2048, 16384))
    ]

    def up_to(found: list[dict[str, float]], key: str) -> str:
        values = [each[key] for each in found]
        return f"up to {max(values):.2f}x, mean {mean(values):.2f}x"

    largest = max(gain_of_2dh(2048, size) for size in (2**-n for n in range(20)))
    rows = [
        ["2DH against linear, 2,048 GPUs", "up to 20.7x", f"up to {largest:.2f}x; 1 MiB: "
         f"{gain_of_2dh(2048, 1):.2f}x, 256 MiB: {gain_of_2dh(2048, 256):.2f}x"],
        ["smallest number of GPUs for which 2DH is faster", "about 256 A100s (Tutel's maintainer)",
         ", ".join(f"{_first_ahead(size):,} at {_size(size)}" for size in SIZES_MIB)],
        ["best r against r = 1", "up to 1.74x (with an unknown baseline)",
         f"{up_to(grid, 'over r = 1')}; 2,048 and 16,384 GPUs: {up_to(large, 'over r = 1')}"],
        ["best r against r = 0", "-",
         f"{up_to(grid, 'over r = 0')}; 2,048 and 16,384 GPUs: {up_to(large, 'over r = 0')}"],
        ["best r against r = s", "-",
         f"{up_to(grid, 'over r = s')}; 2,048 and 16,384 GPUs: {up_to(large, 'over r = s')}"],
        ["best d and all-to-all against d = 1 and linear", "up to 2.00x",
         f"{up_to(grid, 'over d = 1, linear')}; 2,048 and 16,384 GPUs: "
         f"{up_to(large, 'over d = 1, linear')}"],
    ]  # fmt: skip
    return page.table(rows, ["comparison", "paper (measured, A100s)", "model (A100 preset)"])


def schedule_table(content: dict[str, Any]) -> str:
    """Return the table of lower bounds for all-gathers on networks, and of the times of their trees."""

    def trees(found: dict[str, Any]) -> list[Any]:
        return [found["trees"], found["shapes"], found["depth"], f"{found['seconds']:.3f}"]

    rows = []
    for row in content["rows"]:
        shards, bandwidth = row["cut"]
        rows.append(
            [
                f"`{row['network']}`",
                row["ranks"],
                f"{row['optimum']} = {shards} / {bandwidth}",
                f"{row['ranks'] / float(Fraction(row['optimum'])):.6g} {row['unit']}",
                *trees(row["optimal"]),
                *trees(row["few"]),
                f"{row['few']['over']:.3f}",
            ]
        )
    header = ["network", "ranks", "1/x = ranks in S / bandwidth out of S", "algbw", "optimal k", "trees",
              "depth", "CPU, s", "k within 5 %", "trees", "depth", "CPU, s", "T"]  # fmt: skip
    return page.table(rows, header)


def collectives_table(content: dict[str, Any]) -> str:
    """Return the table of measured and predicted times of collectives on emulated networks."""
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in content["rows"]:
        collective, _, way = row["variant"].partition(", ")
        cells[row["configuration"], collective][way] = row
    ways = ("forest", "in 4 slices", "ring")
    rows = [
        [
            f"`{network}`",
            collective,
            f"{1e3 * cell['forest']['busiest']:.0f}",
            *(f"{1e3 * cell[way]['predicted']:.0f}; {1e3 * cell[way]['seconds']:.0f}" for way in ways),
            f"{1e3 * cell['gloo']['seconds']:.0f}",
        ]
        for (network, collective), cell in cells.items()
    ]
    return page.table(rows, ["network", "collective", "busiest link", *ways, "gloo"])


def draw_algorithms(path: Path) -> None:
    """Draw the time of linear divided by that of 2DH over cluster sizes, for each message size."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="A100s, 8 of a node", ylabel="linear / 2DH")
        for size, color in zip(SIZES_MIB, COLORS, strict=False):
            times = [gain_of_2dh(gpus, size) for gpus in GPUS[1:]]
            axes.plot(GPUS[1:], times, color=color, marker=".", label=f"model, {_size(size)} a rank")
        axes.plot([2048], [20.7], "k*", markersize=10, label="paper: up to 20.7 on 2,048")
        axes.axvline(256, color="k", linestyle=":", label="maintainer: 2DH ahead from here")
        axes.axhline(1, color="#888888", linewidth=1)
        _finish(figure, axes, path)


def draw_sizes(path: Path) -> None:
    """Draw a layer's time over cluster sizes: static strategies, the adaptive strategy, and the best P."""
    curves: dict[str, list[float]] = defaultdict(list)
    for gpus in GPUS:
        times = choices(LAYER, gpus)
        curves["P = W, static: r = 1, d = 1, linear"].append(times[Strategy()])
        two_levels = Strategy(algorithm="2dh")
        curves["P = W, static: r = 1, d = 1, 2DH"].append(times.get(two_levels, times[Strategy()]))
        curves["P = W, static: r = 0"].append(times[Strategy(adaptive_r=0)])
        curves["P = W, adaptive: best r, d, algorithm"].append(min(times.values()))
        curves["best P, r, d, algorithm"].append(best(LAYER, A100, gpus // LOCAL, LOCAL)[0].seconds)
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="A100s, 8 of a node", ylabel="step of a layer, ms")
        for (name, seconds), color in zip(curves.items(), COLORS, strict=False):
            axes.plot(GPUS, [1e3 * s for s in seconds], color=color, marker=".", label=name)
        _finish(figure, axes, path)


def draw_parallelism(path: Path) -> None:
    """Draw each r's time divided by the best r's, over tokens per rank, on 2,048 and 16,384 GPUs."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        plots = figure.subplots(1, 2, sharey=True)
        for axes, gpus in zip(plots, (2048, 16384), strict=True):
            slices = gpus // LARGE_LAYER.experts
            shown = [0, *(r for r in (1, 2, 8, slices) if slices % r == 0)]
            for r, color in zip(shown, COLORS, strict=False):
                lost = []
                for tokens in TOKENS:
                    times = choices(replace(LARGE_LAYER, tokens=tokens), gpus)
                    static = min(s for strategy, s in times.items() if strategy.adaptive_r == r)
                    lost.append(static / min(times.values()))
                axes.plot(TOKENS, lost, color=color, marker=".", label=f"r = {r}")
            axes.set(title=f"{gpus:,} A100s, s = {slices}", xlabel="tokens of a rank")
            _finish(figure, axes, None)
        plots[0].set_ylabel("static r / adaptive r")
        figure.savefig(path, dpi=90)


def _first_ahead(mebibytes: float) -> int:
    return next(gpus for gpus in GPUS if gpus > LOCAL and gain_of_2dh(gpus, mebibytes) > 1)


def _size(mebibytes: float) -> str:
    return f"{mebibytes:g} MiB" if mebibytes >= 1 else f"{1024 * mebibytes:g} KiB"


def _finish(figure: Figure, axes: Axes, path: Path | None) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.tick_params(axis="x", rotation=40)
    axes.grid(color="#e5e5e5")
    axes.legend(frameon=False, fontsize=8)
    if path:
        figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
