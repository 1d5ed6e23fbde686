"""Print a table of the scores in OUT: python examples/score_table.py OUT MODEL[:BASE] [MODEL …].

A model has one folder OUT/MODEL-SEED per seed, with a score.txt: perplexity, and BLEU for translation. The
row of a model has its parameters (in millions, if the training log exists), and the mean and standard
deviation of each score over seeds. "against" is the difference to the model BASE with the same seed. Models
without a score are omitted.
"""

import re
import sys
from pathlib import Path

from routing_table import mean_of
from tabulate import tabulate

SCORES = ("perplexity", "BLEU")


def scores(out: Path, model: str) -> dict[str, list[float]]:
    """Return the scores of every finished seed."""
    return {
        path.parent.name.rpartition("-")[2]: [
            float(number) for number in re.findall(r"[\d.]*\d", path.read_text())
        ]
        for path in sorted(out.glob(f"{model}-*/score.txt"))
    }


def millions(out: Path, model: str) -> str:
    """Return the number of parameters, including experts, in millions."""
    for log in out.glob(f"{model}-*/train.log"):
        found = re.findall(r"num\. \w+ model params: ([\d,]+)", log.read_text())[:2]
        return f"{sum(int(number.replace(',', '')) for number in found) / 1e6:.2f}"
    return ""


def cells(out: Path, model: str, base: str) -> list[str]:
    """Return the row of a model."""
    mine = scores(out, model)
    others = scores(out, base) if base not in ("", model) else {}
    row = [model.removesuffix("/moe"), millions(out, model)]
    for i in range(min(map(len, mine.values()))):
        against = [of[i] - others[seed][i] for seed, of in mine.items() if seed in others]
        row += [mean_of([of[i] for of in mine.values()], 2), mean_of(against, 2) if against else ""]
    return row


def main() -> None:
    """Print the table."""
    out = Path(sys.argv[1])
    rows = [
        cells(out, model, base)
        for model, _, base in (word.partition(":") for word in sys.argv[2:])
        if scores(out, model)
    ]
    header = ["model", "parameters, M"]
    for score in SCORES[: (max(map(len, rows)) - 2) // 2]:
        header += [score, "against"]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
