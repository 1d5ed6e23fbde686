"""What networks allow an all-gather, and how long its trees take to make.

All but the seconds is exact and the same on every machine; seconds are medians, by one thread.

    python -m benchmarks.schedule --json benchmarks/results/schedule.json
"""

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.bad_option import BadOption
from benchmarks.output import refuse_unwritable
from fairseq_tutel.plans.forestcoll.forest import Forest, grow
from fairseq_tutel.plans.forestcoll.optimum import optimal_share, optimum
from fairseq_tutel.plans.network import find

NETWORKS = (
    "dgx_a100:1", "dgx_a100:2", "dgx_a100:4", "dgx_h100:1", "dgx_h100:2", "dgx_h100:4", "mi250:1",
    "mi250:2", "boxes:2x4:10:1", "cluster:2x4:40:1", "torus:4x4",
)  # fmt: skip


def main() -> None:
    """Make the trees of every network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="by name or FILE.json")
    parser.add_argument("--rounds", type=int, default=5, help="of which seconds are the median")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    try:
        refuse_unwritable(arguments.json, "--json")
    except BadOption as error:
        parser.error(str(error))
    rows = []
    for name in arguments.networks:
        rows.append(row_of(name, arguments.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        found = {"benchmark": "schedule", "rounds": arguments.rounds, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def row_of(name: str, rounds: int) -> dict[str, Any]:
    """Return the facts about a network."""
    network = find(name)
    best = optimum(network)
    few, few_s = _made(name, None, rounds)
    optimal, optimal_s = _made(name, optimal_share(network, best).trees, rounds)
    return {
        "network": name,
        "ranks": network.ranks,
        "unit": network.unit,
        "optimum": str(best.seconds),
        "cut": best.narrow,
        "few": _facts(few) | {"seconds": few_s},
        "optimal": _facts(optimal) | {"seconds": optimal_s},
    }


def _made(name: str, trees: int | None, rounds: int) -> tuple[Forest, float]:
    """Return the trees and the median of the seconds, from the name to the trees."""
    seconds = []
    for _ in range(rounds):
        began = perf_counter()
        forest = grow(find(name), trees)
        seconds.append(perf_counter() - began)
    return forest, median(seconds)


def _facts(forest: Forest) -> dict[str, Any]:
    return {
        "trees": forest.share.trees,
        "shapes": len(forest.trees),
        "depth": forest.depth,
        "over": float(forest.share.seconds / forest.best.seconds),
    }


if __name__ == "__main__":
    main()
