"""Compute the fastest all-gather of networks, and measure the time to generate its trees.

All results except the seconds are exact and equal on every machine. Seconds are medians on one thread.

    python -m benchmarks.schedule --json benchmarks/results/schedule.json
"""

import argparse
import json
import sys
from statistics import median
from time import process_time
from typing import Any

from benchmarks import command
from fairseq_tutel.plans.forestcoll.forest import Forest, grow
from fairseq_tutel.plans.forestcoll.optimum import optimal_share, optimum
from fairseq_tutel.plans.network import find

NETWORKS = (
    "dgx_a100:1", "dgx_a100:2", "dgx_a100:4", "dgx_h100:1", "dgx_h100:2", "dgx_h100:4", "mi250:1",
    "mi250:2", "boxes:2x4:10:1", "cluster:2x4:40:1", "torus:4x4",
)  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Generate the trees of every network."""
    parser = command.parser_of("schedule", "Time the trees of networks.")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="by name or FILE.json")
    parser.add_argument("--rounds", type=int, default=5, help="of which seconds are the median")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    rows = []
    for name in options.networks[:1] if options.quick else options.networks:
        rows.append(row_of(name, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        found = {"benchmark": "schedule", "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def row_of(name: str, rounds: int) -> dict[str, Any]:
    """Return the row of a network."""
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
    """Return a network's trees, and the median seconds to generate them from the network's name."""
    seconds = []
    for _ in range(rounds):
        began = process_time()
        forest = grow(find(name), trees)
        seconds.append(process_time() - began)
    return forest, median(seconds)


def _facts(forest: Forest) -> dict[str, Any]:
    return {
        "trees": forest.share.trees,
        "shapes": len(forest.trees),
        "depth": forest.depth,
        "over": float(forest.share.seconds / forest.best.seconds),
    }


if __name__ == "__main__":
    sys.exit(main())
