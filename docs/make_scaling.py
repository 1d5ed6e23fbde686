"""Writes the tables and pictures of docs/scaling.md, from the cost model and the emulated cluster.

`python docs/make_scaling.py` rewrites them; with --check it only reports whether the tables are up to date.
Measurements are in benchmarks/results/cluster_*.json (`python -m benchmarks.cluster --json`).
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

import forms
import page
from fairseq_tutel.parallel.cost import Cluster, Work, best, candidates, step_seconds
from fairseq_tutel.parallel.link_fit import Errors, Row, errors_of, fit_machine, relative_errors
from fairseq_tutel.parallel.links import exchange_seconds, faster_algorithm
from fairseq_tutel.parallel.machine import CPU, PRESETS, Machine
from fairseq_tutel.parallel.strategy import Strategy
from fairseq_tutel.tools.report.figures import COLORS

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "scaling.md"
RESULTS = DOCS.parent / "benchmarks" / "results"

A100 = PRESETS["a100"]
LOCAL = 8
GPUS = [8 * 2**n for n in range(12)]  # 8 to 16,384
SIZES_MIB = (1 / 16, 1, 8, 32, 256)
# A layer whose exchange is 32 MiB a rank, of fewer experts than GPUs from 128 on.
LAYER = Work(tokens=4096, model_dim=2048, hidden_dim=8192, experts=64)
# One with large experts, where gathering weights and moving tokens weigh about the same.
LARGE_LAYER = Work(tokens=4096, model_dim=4096, hidden_dim=32768, experts=64)
TOKENS = [2**n for n in range(5, 18)]
# What the paper averages pipelining over: experts of a GPU, D, H, tokens of a GPU, GPUs; 3^5 settings.
PAPER_GRID = (
    (0.5, 1, 2),
    (1024, 2048, 4096),
    (1024, 2048, 4096),
    (4096, 16384, 65536),
    (16, 64, 256),
)
# What the model's choice may cost over the best that was measured.
REGRETS = (0.05, 0.10, 0.20)


def main() -> None:
    """Rewrite or check the page."""
    if page.run(PAGE, filled_in, __doc__):
        draw_algorithms(DOCS / "scaling_2dh.png")
        draw_sizes(DOCS / "scaling_sizes.png")
        draw_parallelism(DOCS / "scaling_r.png")


def filled_in(text: str) -> str:
    """Return the page's text with each table in its place."""
    measured = sorted(RESULTS.glob("cluster_*.json"))
    steps = measured_steps(measured)
    tables = {
        "forms": forms.forms_table(),
        "forms claims": forms.claims_table(),
        "presets": presets_table(),
        "2dh": algorithms_table(),
        "paper": paper_table(),
        "cluster": cluster_table(measured),
        "steps": steps_table(steps),
        "choices": choices_table(steps),
        "schedule": schedule_table(json.loads((RESULTS / "schedule.json").read_text())),
        "collectives": collectives_table(
            json.loads((RESULTS / "cluster_collectives.json").read_text())["collectives"]
        ),
        "plans": plans_table(json.loads((RESULTS / "plans_2x2.json").read_text())["plans"]),
        "scale": scale_table(json.loads((RESULTS / "scale.json").read_text())),
    }
    return page.filled(text, PAGE.name, tables)


def presets_table() -> str:
    """Return the numbers of each GPU in the model."""
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
    header = ["--gpu", "in its node, GB/s", "to other nodes, GB/s", "memory, GB/s", "experts, TFLOP/s",
              "gate, TFLOP/s", "memory, GB"]  # fmt: skip
    return page.table(rows, header)


def gain_of_2dh(gpus: int, mebibytes: float) -> float:
    """Return the time of linear over that of 2DH, for an all-to-all over all A100s."""
    linear, hierarchical = (
        exchange_seconds(mebibytes * 2**20, A100, gpus // LOCAL, LOCAL, a) for a in ("linear", "2dh")
    )
    return linear / hierarchical


def algorithms_table() -> str:
    """Return 2DH against linear by cluster and message size."""
    rows = [[f"{gpus:,}", *(f"{gain_of_2dh(gpus, size):.2f}" for size in SIZES_MIB)] for gpus in GPUS[1:]]
    return page.table(rows, ["A100s", *(f"{_size(size)} a rank" for size in SIZES_MIB)])


def choices(work: Work, gpus: int) -> dict[Strategy, float]:
    """Return the seconds of all strategies of a layer with experts on all GPUs."""
    cluster = Cluster(nodes=gpus // LOCAL, local=LOCAL, expert_parallel_size=gpus)
    strategies = {strategy for c, strategy in candidates(work, gpus // LOCAL, LOCAL) if c == cluster}
    return {strategy: step_seconds(work, A100, cluster, strategy) for strategy in strategies}


def gains(work: Work, gpus: int) -> dict[str, float]:
    """Return the gain of the best strategy over static ones: "r" over r = 1, "d" over d = 1 and linear.

    The first lets r alone change, at d = 1 and linear; the second leaves r at 1.
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
    """Return the paper's numbers and the model's."""
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
        ["2DH over linear, 2,048 GPUs", "up to 20.7x", f"up to {largest:.2f}x; 1 MiB: "
         f"{gain_of_2dh(2048, 1):.2f}x, 256 MiB: {gain_of_2dh(2048, 256):.2f}x"],
        ["2DH ahead of linear", "from about 256 A100s (maintainer)",
         "from " + ", ".join(f"{_first_ahead(size):,} at {_size(size)}" for size in SIZES_MIB)],
        ["adaptive r over static r = 1", "up to 1.74x (static way not in our source)",
         f"{up_to(grid, 'over r = 1')}; 2,048 and 16,384 GPUs: {up_to(large, 'over r = 1')}"],
        ["adaptive r over static r = 0", "-",
         f"{up_to(grid, 'over r = 0')}; 2,048 and 16,384 GPUs: {up_to(large, 'over r = 0')}"],
        ["adaptive r over static r = s", "-",
         f"{up_to(grid, 'over r = s')}; 2,048 and 16,384 GPUs: {up_to(large, 'over r = s')}"],
        ["adaptive d and algorithm over d = 1, linear", "up to 2.00x",
         f"{up_to(grid, 'over d = 1, linear')}; 2,048 and 16,384 GPUs: "
         f"{up_to(large, 'over d = 1, linear')}"],
    ]  # fmt: skip
    return page.table(rows, ["question", "paper (measured, A100s)", "model (A100 preset)"])


def cluster_table(files: list[Path]) -> str:
    """Return the errors of the model that is fitted to the emulated cluster's all-to-alls.

    A fit for every link speed and delay. With several shapes of one, the largest is also predicted from
    the others alone.
    """
    measured: dict[tuple[float, float], list[Row]] = defaultdict(list)
    for file in files:
        content = json.loads(file.read_text())
        config = content["config"]
        measured[config["rate_mbit"], config["delay_us"]] += content.get("a2a", [])
    rows = []
    for (rate, delay), all_to_alls in sorted(measured.items()):
        if not all_to_alls:
            continue
        machine = fit_machine(all_to_alls, CPU)
        agreed, linear, cells = _agreement(all_to_alls, machine)
        shapes = sorted({(r["nodes"], r["local"]) for r in all_to_alls}, key=math.prod)
        rows.append(
            [
                f"{rate:g}",
                f"{8 * machine.inter.bytes_per_s / 1e6:.0f}",
                f"{delay:g}",
                f"{1e6 * machine.inter.alpha_s:.0f}",
                f"{1e6 * machine.launch_s:.0f}",
                ", ".join(f"{nodes}x{local}" for nodes, local in shapes),
                len(all_to_alls),
                _errors(all_to_alls, machine),
                _unseen(all_to_alls, shapes[-1]) if len(shapes) > 1 else "-",
                f"{agreed} of {cells}" if cells else "-",
                f"{linear} of {cells}" if cells else "-",
            ]
        )
    if not rows:
        return "Not measured yet: there is no benchmarks/results/cluster_*.json."
    header = ["link, Mbit/s", "fitted", "delay, us", "fitted alpha, us", "launch, us", "nodes x ranks",
              "rows", "error: median, p90, most", "largest shape, unseen", "faster algorithm",
              "always linear"]  # fmt: skip
    return page.table(rows, header)


def scale_table(content: dict[str, Any]) -> str:
    """Return the costs that grow with the number of ranks."""
    rows = [[row["configuration"], row["variant"], _shown(row)] for row in content["rows"]]
    return page.table(rows, ["what", "ranks", "cost"])


def schedule_table(content: dict[str, Any]) -> str:
    """Return bounds of all-gathers on networks, and the times of their trees."""

    def trees(found: dict[str, Any]) -> str:
        return f"{found['trees']}; {found['shapes']}, {found['depth']}; {found['seconds']:.3f} s"

    rows = []
    for row in content["rows"]:
        shards, bandwidth = row["cut"]
        rows.append(
            [
                f"`{row['network']}`",
                row["ranks"],
                f"{row['optimum']} = {shards} / {bandwidth}",
                f"{row['ranks'] / float(Fraction(row['optimum'])):.6g} {row['unit']}",
                trees(row["optimal"]),
                trees(row["few"]),
                f"{row['few']['over']:.3f}",
            ]
        )
    header = ["network", "N", "1/x = shards / bandwidth", "algbw", "optimal: k; shapes, depth; made in",
              "fewest within 5 %", "its T"]  # fmt: skip
    return page.table(rows, header)


def collectives_table(measured: list[dict[str, Any]]) -> str:
    """Return measured and predicted times of collectives on emulated networks."""
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in measured:
        cells[row["network"], row["collective"]][row["by"]] = row
    rows = [
        [
            f"`{network}`" if ":" in network.partition(" ")[0] else network,
            collective,
            f"{1e3 * cell['forest']['busiest']:.0f}",
            *(
                f"{1e3 * cell[by]['predicted']:.0f}; {1e3 * cell[by]['seconds']:.0f}"
                for by in ("forest", "sliced", "ring")
            ),
            f"{1e3 * cell['gloo']['seconds']:.0f}",
        ]
        for (network, collective), cell in cells.items()
    ]
    header = ["network", "collective", "busiest link", "forest", "in 4 slices", "ring", "gloo"]
    return page.table(rows, header)


def plans_table(measured: list[dict[str, Any]]) -> str:
    """Return the time of each plan over gloo's by size, by messages."""
    lines: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    base: dict[tuple[str, int], float] = {}
    for row in measured:
        if row["by"] == "gloo":
            base[row["collective"], row["bytes"]] = row["seconds"]
        elif not row["by"].startswith("hybrid "):  # a removed way
            lines[row["collective"], row["by"]][row["bytes"]] = row["seconds"]
    sizes = sorted({size for _, size in base})
    rows = [
        [collective, plan, *(f"{cells[size] / base[collective, size]:.2f}" for size in sizes)]
        for (collective, plan), cells in lines.items()
    ]
    return page.table(rows, ["collective", "plan", *(f"{size // 1024} KiB" for size in sizes)])


def _shown(row: dict[str, Any]) -> str:
    """Return a row of benchmarks.scale as one cell."""
    seconds = f"{row['seconds']:.3g} s" if "seconds" in row else ""
    accused = f"{row['accusers']:,} ranks accuse living ones" if row.get("accusers") else ""
    parts = (seconds, row.get("note", row.get("reason", "")), accused)
    return "; ".join(part for part in parts if part) or "-"


class Step(NamedTuple):
    """A measured step on the emulated cluster, and its prediction.

    Attributes:
        cluster: nodes x ranks and link, for tables.
        section: "static" for r, d and algorithm, "overlap" for d alone.
        form: of the experts, "sleep" or "compute".
        tokens: of a rank.
        strategy: the choice.
        seconds: measured.
        own: predicted by links that were fitted to this shape's all-to-alls.
        others: predicted by links that were fitted to other shapes' alone; None if there are none.
    """

    cluster: str
    section: str
    form: str
    tokens: int
    strategy: Strategy
    seconds: float
    own: float
    others: float | None


def measured_steps(files: list[Path]) -> list[Step]:
    """Return the measured steps of files with links that are fitted in any file."""
    contents = [json.loads(file.read_text()) for file in files]
    steps = []
    for content in contents:
        config = content["config"]
        alike = [c for c in contents if c["config"]["delay_us"] == config["delay_us"]]
        own = _links_for(config, [c for c in alike if _shape(c) == _shape(content)])
        others = _links_for(config, [c for c in alike if _shape(c) != _shape(content)])
        if own is None:
            continue
        name = f"{config['nodes']}x{config['local']}, {config['rate_mbit']:g} Mbit/s"
        for section in ("static", "overlap"):
            for row in content.get(section, []):
                flops_per_s = _experts_rate(row, section, content)
                if flops_per_s is None:
                    continue
                predicted = [
                    _predicted_step(row, section, config, replace(links, flops_per_s=flops_per_s))
                    for links in (own, others)
                    if links
                ]
                steps.append(
                    Step(
                        cluster=name,
                        section=section,
                        form=row["form"],
                        tokens=row["tokens"],
                        strategy=_strategy_of(row),
                        seconds=row["seconds"],
                        own=predicted[0],
                        others=predicted[1] if others else None,
                    )
                )
    return steps


def steps_table(steps: list[Step]) -> str:
    """Return the errors of predicted steps, by cluster and form of experts."""
    groups: dict[tuple[str, str, str], list[Step]] = defaultdict(list)
    for step in steps:
        kind = "d alone" if step.section == "overlap" else "r, d, algorithm"
        if step.strategy.adaptive_r == 0:
            kind = "r = 0"
        groups[kind, step.cluster, step.form].append(step)
    rows = []
    for (kind, cluster, form), found in sorted(groups.items(), key=lambda group: group[0][0]):
        others = [(step.others, step.seconds) for step in found if step.others is not None]
        rows.append(
            [
                kind,
                cluster,
                form,
                len(found),
                _percent(errors_of((step.own, step.seconds) for step in found)),
                f"{mean(step.own / step.seconds for step in found):.2f}",
                _percent(errors_of(others)) if others else "-",
            ]
        )
    if not rows:
        return "Not measured yet: there is no benchmarks/results/cluster_*.json with steps."
    header = ["choices of", "cluster", "experts", "rows", "error: median, p90, most",
              "predicted / measured, mean", "links of other shapes: error"]  # fmt: skip
    return page.table(rows, header)


def choices_table(steps: list[Step]) -> str:
    """Return the cost of the model's best (r, d, algorithm) over the measured best.

    Beside it the same of one choice for all cells of a line, the one that costs least in the mean.
    """
    cells: dict[tuple[str, str], dict[int, dict[Strategy, Step]]] = defaultdict(lambda: defaultdict(dict))
    for step in steps:
        if step.section == "static":
            cells[step.cluster, step.form][step.tokens][step.strategy] = step
    rows = []
    for (cluster, form), by_tokens in cells.items():
        found = list(by_tokens.values())
        columns = [_regrets(found, lambda step: step.own)]
        if all(step.others is not None for cell in found for step in cell.values()):
            columns.append(_regrets(found, lambda step: step.others))
        fixed = {strategy: [_regret(cell, strategy) for cell in found] for strategy in found[0]}
        columns.append(min(fixed.values(), key=sum))
        shown = [_within(regrets) for regrets in columns]
        shown[1:1] = ["-"] * (3 - len(shown))
        rows.append([cluster, form, len(found), *shown])
    if not rows:
        return "Not measured yet: there is no benchmarks/results/cluster_*.json with static choices."
    limits = ", ".join(f"{100 * limit:.0f}" for limit in REGRETS)
    header = ["cluster", "experts", "cells", f"within {limits} %; most", "links of other shapes",
              "one choice for all cells"]  # fmt: skip
    return page.table(rows, header)


def draw_algorithms(path: Path) -> None:
    """Draw linear over 2DH by cluster size, for each message size."""
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
    """Draw a layer's step by cluster size: static strategies, the adaptive one, and the best P."""
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
    """Draw the cost of static r over the best r, by tokens of a rank, on 2,048 and 16,384 GPUs."""
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


def _shape(content: dict[str, Any]) -> tuple[int, int]:
    return content["config"]["nodes"], content["config"]["local"]


def _links_for(config: dict[str, Any], contents: list[dict[str, Any]]) -> Machine | None:
    """Return the profile that is fitted to the all-to-alls of the nearest link speed.

    Links between nodes are as much faster or slower as the speed that they are limited to.
    """
    rates = {c["config"]["rate_mbit"] for c in contents if c.get("a2a")}
    if not rates:
        return None
    rate = min(rates, key=lambda r: abs(r - config["rate_mbit"]))
    rows = [r for c in contents if c["config"]["rate_mbit"] == rate for r in c.get("a2a", [])]
    machine = fit_machine(rows, CPU)
    bytes_per_s = machine.inter.bytes_per_s * config["rate_mbit"] / rate
    return replace(machine, inter=replace(machine.inter, bytes_per_s=bytes_per_s))


def _experts_rate(row: dict[str, Any], section: str, content: dict[str, Any]) -> float | None:
    """Return the experts' FLOP/s: those of their sleep, or the measured ones."""
    config = content["config"]
    if row["form"] == "sleep":
        hidden = config["overlap_hidden_dim" if section == "overlap" else "hidden_dim"]
        seconds_per_row = 1e-3 * config["expert_ms_per_row"] * row.get("cost", 1.0)
        return 4 * config["model_dim"] * hidden / seconds_per_row
    alone = [r for r in content.get("overlap", []) if r["form"] == "compute"]
    if not alone:
        return None
    flops = 12 * alone[0]["tokens"] * config["model_dim"] * config["overlap_hidden_dim"]
    return flops / alone[0]["experts_seconds"]


def _strategy_of(row: dict[str, Any]) -> Strategy:
    """Return the strategy of a row, with defaults for missing fields."""
    return Strategy(
        adaptive_r=row.get("adaptive_r", 1),
        overlap=row["overlap"],
        algorithm=row.get("algorithm", "linear"),
    )


def _predicted_step(row: dict[str, Any], section: str, config: dict[str, Any], machine: Machine) -> float:
    alone = section == "overlap"  # one expert a rank
    world = config["nodes"] * config["local"]
    work = Work(
        tokens=row["tokens"],
        model_dim=config["model_dim"],
        hidden_dim=config["overlap_hidden_dim" if alone else "hidden_dim"],
        experts=world if alone else config["experts"],
        top_k=1,
        bytes_per_element=4,
    )
    cluster = Cluster(nodes=config["nodes"], local=config["local"], expert_parallel_size=world)
    return step_seconds(work, machine, cluster, _strategy_of(row))


def _regrets(cells: list[dict[Strategy, Step]], predicted: Callable[[Step], float | None]) -> list[float]:
    """Return the cost of the choice with the least predicted time, for each cell."""
    return [_regret(cell, min(cell, key=lambda h, c=cell: predicted(c[h]))) for cell in cells]


def _regret(cell: dict[Strategy, Step], strategy: Strategy) -> float:
    """Return the measured time of a choice over that of the best, minus one."""
    return cell[strategy].seconds / min(step.seconds for step in cell.values()) - 1


def _within(regrets: list[float]) -> str:
    counts = ", ".join(str(sum(r <= limit for r in regrets)) for limit in REGRETS)
    return f"{counts}; {max(regrets):.0%}"


def _agreement(rows: list[Row], machine: Machine) -> tuple[int, int, int]:
    """Count (shape, size) where the model names the faster algorithm, where linear is it, and all."""
    cells: dict[tuple[int, int, float], dict[str, float]] = defaultdict(dict)
    for row in rows:
        cells[row["nodes"], row["local"], row["bytes_per_rank"]][row["algorithm"]] = row["seconds"]
    pairs = {cell: times for cell, times in cells.items() if len(times) == 2}
    faster = {cell: min(times, key=lambda a, t=times: t[a]) for cell, times in pairs.items()}
    agreed = sum(faster_algorithm(machine, *cell) == name for cell, name in faster.items())
    return agreed, list(faster.values()).count("linear"), len(pairs)


def _unseen(rows: list[Row], shape: tuple[int, int]) -> str:
    """Return the errors of a model on one shape, if it is fitted to the others."""
    seen = [row for row in rows if (row["nodes"], row["local"]) != shape]
    unseen = [row for row in rows if (row["nodes"], row["local"]) == shape]
    return _errors(unseen, fit_machine(seen, CPU))


def _errors(rows: list[Row], machine: Machine) -> str:
    return _percent(relative_errors(rows, machine))


def _percent(errors: Errors) -> str:
    return f"{errors.median:.0%}, {errors.p90:.0%}, {errors.largest:.0%}"


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
