"""Print the table of examples/pregated.sh: python examples/pregated_table.py OUT.

Perplexity on val and BLEU on test_2016 of every model, mean of the seeds with the standard deviation;
"against" is the difference, seed by seed, to the conventional model of as many updates.
"""

import re
import sys
from pathlib import Path

from routing_table import mean_of
from tabulate import tabulate

# Model: (its folder, the conventional one of as many updates).
MODELS = {
    "conventional": ("moe", None),
    "pre-gated from the beginning": ("pregated", "moe"),
    "converted": ("converted", "moe"),
    "conventional, trained on": ("tuned/moe", None),
    "converted and fine-tuned": ("tuned/pregated", "tuned/moe"),
}


def scores(out: Path, folder: str) -> list[list[float]]:
    """Return perplexity and BLEU of every seed that is done."""
    return [
        [float(number) for number in re.findall(r"[\d.]+", path.read_text())]
        for path in sorted(out.glob(f"{folder}-*/score.txt"))
    ]


def cells(out: Path, folder: str, base: str | None) -> list[str]:
    """Return both numbers of a model, each followed by what it is against its base."""
    mine = scores(out, folder)
    others = scores(out, base) if base else []
    row = []
    for i in range(2):
        row.append(mean_of([seed[i] for seed in mine], 2))
        against = [seed[i] - other[i] for seed, other in zip(mine, others, strict=False)]
        row.append(mean_of(against, 2) if against else "")
    return row


def main() -> None:
    """Print the table."""
    out = Path(sys.argv[1])
    rows = [
        [name, *cells(out, folder, base)]
        for name, (folder, base) in MODELS.items()
        if scores(out, folder)
    ]
    header = ["model", "perplexity", "against", "BLEU", "against"]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
