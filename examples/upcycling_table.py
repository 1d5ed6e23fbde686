"""Print the table of examples/upcycling.sh: python examples/upcycling_table.py OUT.

Perplexity on the report half where a case begins and after its training, the latter's difference, seed by
seed, to the dense model trained on, and the load of the busiest expert in even shares over 20 updates,
mean of the layers, over the last 100 updates. Mean of the seeds, with the standard deviation.
"""

import statistics
import sys
from pathlib import Path

from routing_table import LAST_RECORDS, mean_of, perplexity
from tabulate import tabulate

from fairseq_tutel.tools.run_log import LOAD, join, read_log

BASE = "dense"


def after(case: Path) -> dict[str, float]:
    """Return the perplexity after the training of every seed that is done, by seed."""
    return {path.parent.name: perplexity(path) for path in sorted(case.glob("*-*/eval.txt"))}


def busiest(run: Path) -> list[float]:
    """Return the largest load of every layer in the last records of a training; none of a dense one."""
    records = join(read_log((run / "train.log").read_text().splitlines())).training[-LAST_RECORDS:]
    return [max(load) for r in records for key, load in r.lists.items() if key.startswith(LOAD)]


def row(case: Path) -> list[str]:
    """Return the case's name and numbers."""
    found = after(case)
    base = {name.replace(BASE, "moe"): value for name, value in after(case.parent / BASE).items()}
    against = [value - base[name] for name, value in found.items() if name in base]
    start = [perplexity(path) for path in sorted(case.glob("start-*.txt"))]
    loads = [statistics.mean(load) for name in found if (load := busiest(case / name))]
    return [
        case.name,
        mean_of(start, 2),
        mean_of(list(found.values()), 2),
        mean_of(against, 2) if against else "-",
        mean_of(loads, 2) if loads else "-",
    ]


def main() -> None:
    """Print the table."""
    cases = sorted({path.parent for path in Path(sys.argv[1]).glob("*/start-*.txt")})
    header = ["case", "begins at", "perplexity", "against", "busiest expert"]
    print(tabulate([row(case) for case in cases], header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
