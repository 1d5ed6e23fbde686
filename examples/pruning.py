"""Compare pruning of experts by importance with pruning by load, without training after pruning.

    python examples/pruning.py DATA_BIN [OUT]

DATA_BIN is binarized parallel text, such as OUT/bin of translation.sh. For each seed, the model of
translation_model.py is trained for 300 updates, with the dimensions of quickstart.sh but 16 experts per
layer. Loads and importances of experts are collected on the first 2,000 sentences of train, and perplexity
is measured on valid. A fraction of each layer's experts is kept; with "global", a fraction of the whole
model's experts. The selection "random" keeps the same random experts in all layers. BLEU is measured on
test for models that keep the experts with the highest load or importance. Models and results that already
exist in OUT are skipped. At the end, a table is printed. Environment variables with defaults: SEEDS ("1 2
3"), SHARES ("0.75 0.5 0.25"), OMP_NUM_THREADS (all cores).
"""

import json
import os
import random
import sys
from pathlib import Path

from routing_table import mean_of
from tabulate import tabulate
from translation_model import EXPERTS, bleu, perplexity, run, train

WAYS = {
    "load": ("load",),
    "importance": ("importance",),
    "load, global": ("load", "--globally"),
    "importance, global": ("importance", "--globally"),
}
TRANSLATED = ("load", "importance")  # BLEU is measured for these selections.


def results(data: Path, folder: Path, seed: int, shares: list[float]) -> dict[str, float]:
    """Return the scores of a seed's models by name, such as "0.5 load"; "1" is the model with all experts.

    If a name ends with ", BLEU", the score is BLEU, else perplexity.
    """
    path, file, use = train(data, folder, seed), folder / "results.json", folder / "use.json"
    if not use.exists():
        outputs = ("--output", folder / "tokens.html", "--output-statistics", use)
        run("tokens", path, data, "--split", "train", "--limit", 2000, *outputs, "--overwrite")
    found = json.loads(file.read_text()) if file.exists() else {}
    rules: dict[str, tuple[object, ...]] = {"1": ()}
    chosen = random.Random(seed)
    for share in shares:
        for way, words in WAYS.items():
            rules[f"{share:g} {way}"] = ("--share", share, "--by", *words, "--statistics", use)
        gone = chosen.sample(range(EXPERTS), EXPERTS - round(share * EXPERTS))
        rules[f"{share:g} random"] = ("--drop", ",".join(map(str, gone)))
    for name, words in rules.items():
        scores = {name: perplexity}
        if name.partition(" ")[2] in ("", *TRANSLATED):
            scores[f"{name}, BLEU"] = bleu
        missing = [score for score in scores if score not in found]
        if not missing:
            continue
        model = folder / "pruned.pt" if words else path
        if words:
            run("convert", "prune", path, *words, "--output", model, "--overwrite")
        for score in missing:
            found[score] = scores[score](model, data)
            file.write_text(json.dumps(found, indent=1))
            print(f"seed {seed}, {score}: {found[score]:.2f}", flush=True)
    return found


def main() -> None:
    """Train and prune the models, and print the table."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/pruning.py DATA_BIN [OUT]")
    data, out = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "outputs/pruning")
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "1 2 3").split()]
    shares = [float(share) for share in os.environ.get("SHARES", "0.75 0.5 0.25").split()]
    found = [results(data, out / f"seed-{seed}", seed, shares) for seed in seeds]
    ways = (*WAYS, "random", *(f"{way}, BLEU" for way in TRANSLATED))
    whole = {"load": "1", "load, BLEU": "1, BLEU"}  # The model "1" has all experts.

    def row(share: str, names: list[str]) -> list[str]:
        return [share, *(mean_of([each[name] for each in found], 2) if name else "" for name in names)]

    rows = [row("100 %", [whole.get(way, "") for way in ways])]
    rows += [row(f"{100 * share:g} %", [f"{share:g} {way}" for way in ways]) for share in shares]
    print(tabulate(rows, ["experts kept", *ways], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
