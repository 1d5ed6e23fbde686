"""Rows as tables, one for every section; `python -m benchmarks.cluster.tables FILE` shows a file's."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tabulate import tabulate

Row = dict[str, Any]
# Tutel (Hwang et al. 2023): the most that adaptive parallelism, and adaptive pipelining, gained there.
PAPER_R, PAPER_OVERLAP = 1.74, 2.00
REGRET_GOAL, BOUND_GOAL = 0.05, 0.80


def report(rows: Iterable[Row]) -> str:
    """Return the tables of all sections that have rows."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(row["section"], []).append(row)
    return "\n".join(
        f"\n{title}\n\n{table(sections[name])}"
        for name, (title, table) in TABLES.items()
        if name in sections
    )


def _links(rows: list[Row]) -> str:
    return _table(
        {
            "link": [row["where"] for row in rows],
            "KiB each way": [row["bytes"] // 1024 for row in rows],
            "ms": [_ms(row) for row in rows],
            "Mbit/s": [f"{row['mbit']:.0f}" for row in rows],
        }
    )


def _all_to_alls(rows: list[Row]) -> str:
    by_algorithm: dict[str, list[Row]] = {}
    for row in rows:
        by_algorithm.setdefault(row["algorithm"], []).append(row)
    linear = by_algorithm["linear"]
    columns = {"KiB a rank": [row["bytes_per_rank"] // 1024 for row in linear]}
    for name, measured in by_algorithm.items():
        columns[f"{name}, ms"] = [_ms(row) for row in measured]
    if "2dh" in by_algorithm:
        pairs = zip(linear, by_algorithm["2dh"], strict=True)
        columns["linear / 2dh"] = [f"{a['seconds'] / b['seconds']:.2f}" for a, b in pairs]
    return _table(columns)


def _overlaps(rows: list[Row]) -> str:
    table = _table(
        {
            "experts": [f"{row['form']} x{row['cost']:g}" for row in rows],
            "tokens a rank": [row["tokens"] for row in rows],
            "exchange a, ms": [f"{1e3 * row['exchange_seconds']:.1f}" for row in rows],
            "experts b, ms": [f"{1e3 * row['experts_seconds']:.1f}" for row in rows],
            "d": [row["overlap"] for row in rows],
            "step, ms": [_ms(row) for row in rows],
            "speedup": [f"{row['speedup']:.2f}" for row in rows],
            "(a + b) / max(a, b)": [_of_bound(row, "whole") for row in rows],
            "by forward and backward": [_of_bound(row, "phases") for row in rows],
        }
    )
    best: dict[str, Row] = {}
    for row in rows:
        name = f"{row['form']} x{row['cost']:g}"
        if name not in best or row["speedup"] > best[name]["speedup"]:
            best[name] = row
    reached = "; ".join(
        f"{name} {100 * row['share_of_whole']:.0f} %, {100 * row['share_of_phases']:.0f} %"
        for name, row in best.items()
    )
    return (
        f"{table}\n\nThe best d reaches of the one bound and of the other (goal "
        f"{100 * BOUND_GOAL:.0f} %): {reached}."
    )


def _of_bound(row: Row, name: str) -> str:
    return f"{row[f'bound_{name}']:.2f}, {100 * row[f'share_of_{name}']:.0f} % of it"


def _static(rows: list[Row]) -> str:
    """One table for every form of experts: a line for a choice, columns for a number of tokens."""
    by_form: dict[str, dict[int, dict[str, Row]]] = {}
    for row in rows:
        cell = by_form.setdefault(row["form"], {}).setdefault(row["tokens"], {})
        cell[_strategy(row)] = row
    return "\n\n".join(_static_of(form, cells) for form, cells in by_form.items())


def _static_of(form: str, cells: dict[int, dict[str, Row]]) -> str:
    # A run that was cut short has fewer choices in its last cell.
    names = list(next(iter(cells.values())))
    columns: dict[str, list[Any]] = {f"experts {form}": names}
    for tokens, measured in cells.items():
        best = min(row["seconds"] for row in measured.values())
        found = [measured.get(name) for name in names]
        columns[f"{tokens} tokens a rank: ms"] = ["" if row is None else _ms(row) for row in found]
        columns[f"x best of {tokens}"] = [
            "" if row is None else f"{row['seconds'] / best:.2f}" for row in found
        ]
    return _table(columns)


def _tuners(rows: list[Row]) -> str:
    table = _table(
        {
            "experts": [row["form"] for row in rows],
            "tokens a rank": [row["tokens"] for row in rows],
            "tuner's choice": [_strategy(row) for row in rows],
            "ms": [f"{1e3 * row['seconds']:.1f}" for row in rows],
            "best static": [_strategy(row["best"]) for row in rows],
            "best, ms": [f"{1e3 * row['best_seconds']:.1f}" for row in rows],
            "regret": [f"{100 * row['regret']:+.1f} %" for row in rows],
            "measured again": [row["measured_again"] for row in rows],
            "noise": [f"{100 * row['noise']:.1f} %" for row in rows],
            "steps": [row["steps"] if row["settled"] else "never settled" for row in rows],
            f"over worst r (paper: to {PAPER_R:.2f}x)": [
                f"{row['gain_over_worst_r']:.2f}x" for row in rows
            ],
            f"over worst d, algorithm (paper: to {PAPER_OVERLAP:.2f}x)": [
                f"{row['gain_over_worst_overlap']:.2f}x" for row in rows
            ],
            "over worst of all": [f"{row['gain_over_worst']:.2f}x" for row in rows],
        }
    )
    regrets = [row["regret"] for row in rows]
    within = sum(regret <= REGRET_GOAL for regret in regrets)
    return (
        f"{table}\n\nRegret: {within} of {len(rows)} at most {100 * REGRET_GOAL:.0f} %; mean "
        f"{100 * sum(regrets) / len(regrets):+.1f} %, largest {100 * max(regrets):+.1f} %; over the best "
        "of the tuner's choice and all near the grid's best, measured again in turns. Noise: by how much "
        "two halves of the best choice's own times differ."
    )


def _trainings(rows: list[Row]) -> str:
    return _table(
        {
            "tokens a rank": [row["tokens"] for row in rows],
            "--moe-adaptive auto": [_strategy(row) for row in rows],
            "ms an update": [_ms(row) for row in rows],
            "best static": [_strategy(row["best"]) for row in rows],
            "best, ms": [f"{1e3 * row['best_seconds']:.1f}" for row in rows],
            "slower by": [f"{100 * row['regret']:+.1f} %" for row in rows],
            "over worst of all": [f"{row['gain_over_worst']:.2f}x" for row in rows],
        }
    )


def _collectives(rows: list[Row]) -> str:
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["network"], row["collective"]), {})[row["by"]] = row
    return _table(
        {
            "network": [network for network, _ in cells],
            "collective": [collective for _, collective in cells],
            "KiB a shard": [row["forest"]["shard_bytes"] // 1024 for row in cells.values()],
            **{
                f"{by}: predicted; measured, ms": [
                    f"{1e3 * row[by]['predicted']:.0f}; {_ms(row[by])}" if by in row else ""
                    for row in cells.values()
                ]
                for by in ("forest", "sliced", "ring")
            },
            "gloo": [_ms(row["gloo"]) for row in cells.values()],
        }
    )


def _plans(rows: list[Row]) -> str:
    """A line for a collective and a size: the median of each way over gloo's."""
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["collective"], row["bytes"]), {})[row["by"]] = row
    tables = []
    for collective in dict.fromkeys(name for name, _ in cells):
        own = {size: cell for (name, size), cell in cells.items() if name == collective}
        ways = [by for by in next(iter(own.values())) if by != "gloo"]
        columns: dict[str, list[Any]] = {
            collective: [f"{size // 1024} KiB" for size in own],
            "gloo, ms": [_ms(cell["gloo"]) for cell in own.values()],
        }
        for by in ways:
            columns[by] = [f"{cell[by]['seconds'] / cell['gloo']['seconds']:.2f}" for cell in own.values()]
        tables.append(_table(columns))
    return "\n\n".join(tables)


TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "links": ("Links, every pair of ranks at once", _links),
    "a2a": ("All-to-all", _all_to_alls),
    "overlap": ("Pipelining: a step by d", _overlaps),
    "static": ("Static choices: a step by r, d and algorithm", _static),
    "tuner": ("Tuner", _tuners),
    "training": ("An update of a language model by fairseq's Trainer", _trainings),
    "collectives": ("Collectives over a network's links", _collectives),
    "plans": ("Collective plans between nodes, over gloo's time", _plans),
}


def _strategy(row: Row) -> str:
    if row["adaptive_r"] == 0:
        return "r=0"
    return f"r={row['adaptive_r']} d={row['overlap']} {row['algorithm']}"


def _ms(row: Row) -> str:
    least, most = 1e3 * row["seconds_min"], 1e3 * row["seconds_max"]
    return f"{1e3 * row['seconds']:.1f} ({least:.1f}..{most:.1f})"


def _table(columns: dict[str, list[Any]]) -> str:
    return tabulate(columns, headers="keys", tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    print(report({"section": name, **row} for name in TABLES for row in found.get(name, [])))
