"""Print the table of examples/distillation.sh: python examples/distillation_table.py OUT.

The table has mean perplexities on the second half of valid, with standard deviations over seeds. "Against"
is the difference to the student without a teacher and with the same seed. "Seconds" is the training time.
"""

import re
import statistics
import sys
from pathlib import Path

from routing_table import perplexity
from tabulate import tabulate


def seconds(run: Path) -> float:
    """Return the training time of a run in seconds."""
    return float(re.findall(r'"train_wall": "(\d+)"', (run / "output.txt").read_text())[-1])


def shown(values: list[float], sign: str = "") -> str:
    """Return the mean of some numbers and, if there are several, the standard deviation."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{spread}"


def rows(out: Path) -> list[list[str]]:
    """Return a table row for the teacher, and for each way to train the student."""
    found = [["teacher, 4 layers", shown([perplexity(out / "moe-1" / "eval.txt")]), "", "", ""]]
    without: dict[str, float] = {}
    for name in ("without", "staged", "full"):
        runs = sorted((out / name).glob("moe-*"))
        values = {run.name: perplexity(run / "eval.txt") for run in runs}
        without = without or values
        against = shown([value - without[seed] for seed, value in values.items()], "+")
        times = f"{statistics.mean(map(seconds, runs)):.0f}"
        found.append([name, shown(list(values.values())), against, str(len(runs)), times])
    return found


if __name__ == "__main__":
    header = ("student, 3 layers", "perplexity", "against without", "seeds", "s of training")
    print(tabulate(rows(Path(sys.argv[1])), header, tablefmt="github", disable_numparse=True))
