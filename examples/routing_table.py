"""Print the table of examples/routing_study.sh: python examples/routing_table.py OUT.

Perplexity on the report half, with the places that a case was trained with and without dropping; the share
of (token, choice) pairs dropped, and the load of the busiest expert in even shares over 20 updates, mean of
the layers, both over the last 100 updates of training. Mean of the seeds, with the standard deviation.
"""

import re
import statistics
import sys
from pathlib import Path

from tabulate import tabulate

from fairseq_tutel.tools.run_log import LOAD, join, read_log

LAST_RECORDS = 5


def perplexity(path: Path) -> float:
    """Return what fairseq-eval-lm printed into this file."""
    return float(re.findall(r"Perplexity: ([\d.]+)", path.read_text())[-1])


def numbers(run: Path) -> list[float]:
    """Return the four numbers of one training."""
    records = join(read_log((run / "train.log").read_text().splitlines())).training[-LAST_RECORDS:]
    dropped = [(r.values["overflow_expert1"] + r.values["overflow_expert2"]) / 2 for r in records]
    busiest = [max(load) for r in records for key, load in r.lists.items() if key.startswith(LOAD)]
    return [
        perplexity(run / "eval.txt"),
        perplexity(run / "dropless.txt"),
        statistics.mean(dropped),
        statistics.mean(busiest),
    ]


def row(case: Path) -> list[str]:
    """Return the case's name, and each number's mean and deviation over the seeds."""
    seeds = [numbers(run) for run in sorted(case.glob("moe-*")) if (run / "dropless.txt").exists()]
    cells = [case.name, str(len(seeds))]
    for places, values in zip((1, 1, 1, 2), zip(*seeds, strict=True), strict=True):
        spread = f" ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.{places}f}{spread}")
    return cells


def main() -> None:
    """Print the table."""
    cases = [path.parent.parent for path in sorted(Path(sys.argv[1]).glob("*/moe-1/dropless.txt"))]
    header = ["case", "seeds", "perplexity", "without dropping", "dropped, %", "busiest expert"]
    print(tabulate([row(case) for case in cases], header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
