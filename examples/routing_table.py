"""Print the table of examples/routing_study.sh: python examples/routing_table.py OUT.

The columns are: perplexity on half of valid, with the training capacity and without dropping; the share
of dropped assignments; and the busiest expert's load relative to an even share, over 20 updates and
averaged over layers. The shares and loads are from the last 100 updates. The table shows means over seeds
with standard deviations. The column "against" is the difference in perplexity to the run with the same seed
and capacity and the drop policy position or, in dropless training, the balance loss gshard.
"""

import re
import statistics
import sys
from pathlib import Path

from tabulate import tabulate

from fairseq_tutel.tools.training_log import LOAD, join, read_log

LAST_RECORDS = 5


def perplexity(path: Path) -> float:
    """Return the perplexity in an output file of fairseq-eval-lm."""
    return float(re.findall(r"Perplexity: ([\d.]+)", path.read_text())[-1])


def numbers(run: Path) -> list[float]:
    """Return the four numbers of the table for one run."""
    records = join(read_log((run / "train.log").read_text().splitlines())).training[-LAST_RECORDS:]
    dropped = [(r.values["overflow_expert1"] + r.values["overflow_expert2"]) / 2 for r in records]
    busiest = [max(load) for r in records for key, load in r.lists.items() if key.startswith(LOAD)]
    return [
        perplexity(run / "eval.txt"),
        perplexity(run / "dropless.txt"),
        statistics.mean(dropped),
        statistics.mean(busiest),
    ]


def seeds_of(case: Path) -> list[list[float]]:
    """Return the table's four numbers for every finished seed."""
    return [numbers(run) for run in sorted(case.glob("moe-*")) if (run / "dropless.txt").exists()]


def row(case: Path) -> list[str]:
    """Return the name of the case, and each number's mean and standard deviation over the seeds."""
    seeds = seeds_of(case)
    capacity = case.name.partition("-")[0]
    base = seeds_of(case.parent / f"{capacity}-{'gshard' if capacity == 'dropless' else 'position'}")
    against = [mine[0] - other[0] for mine, other in zip(seeds, base, strict=False)]
    cells = [case.name, str(len(seeds)), mean_of([s[0] for s in seeds], 1), mean_of(against, 1)]
    return cells + [mean_of([s[i] for s in seeds], places) for i, places in ((1, 1), (2, 1), (3, 2))]


def mean_of(values: list[float], places: int) -> str:
    """Return the mean and, for several numbers, the standard deviation."""
    spread = f" ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{places}f}{spread}"


def main() -> None:
    """Print the table."""
    cases = [path.parent.parent for path in sorted(Path(sys.argv[1]).glob("*/moe-1/dropless.txt"))]
    header = [
        "case",
        "seeds",
        "perplexity",
        "against",
        "without dropping",
        "dropped, %",
        "busiest expert",
    ]
    print(tabulate([row(case) for case in cases], header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
