"""Measure how a translation model's quality depends on the formats of its experts and other weights.

    python examples/quantized_quality.py DATA_BIN [OUT]

DATA_BIN is binarized parallel text, such as OUT/bin of translation.sh. For each seed, the model of
translation_model.py is trained for 300 updates, with the dimensions of quickstart.sh but 16 experts per
layer. The command `convert sharded` stores the model's experts in each format. Perplexity on valid and BLEU
on test are measured with experts in an expert store (on-demand). Models and results that already exist in
OUT are skipped. OUT may be the folder of pruning.py, which trains the same models. At the end, a table is
printed. Environment variables with defaults: SEEDS ("1 2 3"), OMP_NUM_THREADS (all cores).
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from routing_table import mean_of
from tabulate import tabulate
from translation_model import bleu, perplexity, run, train

BITS = {"fp32": "32", "bf16": "16", "int8": "8.2", "int4": "4.25"}  # The number of bits per expert weight.
# The `dtype` of `from_checkpoint` for each format of the other weights.
OTHERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
# Each pair has the format of the experts and the format of the other weights.
CASES = (
    *((name, "fp32") for name in BITS),
    *((name, other) for other in ("bf16", "int8") for name in ("int8", "int4")),
)
# For each score, a function that compares a model with the fp32 model of the same seed.
CHANGES = {
    "perplexity": lambda value, base: 100 * (value / base - 1),
    "BLEU": lambda value, base: value - base,
}


def converted(path: Path, name: str) -> tuple[Path, list[float]]:
    """Write a model with experts in a format, and return its path and the relative error of each matrix."""
    target = path.with_name(f"{name}.pt")
    words = () if name == "fp32" else ("--expert-dtype", name)
    output = run("convert", "sharded", path, "--output", target, "--overwrite", *words)
    return target, [float(error) for error in re.findall(r"relative error ([\d.e+-]+)", output)]


def results(data: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Return the scores of a seed's models by name, such as "int8, bf16, BLEU", and the relative errors."""
    path, file = train(data, folder, seed), folder / "quantized.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    for experts, others in CASES:
        names = {score: f"{experts}, {others}, {score}" for score in CHANGES}
        if found.keys() >= {*names.values()}:
            continue
        model, found[f"{experts}, errors"] = converted(path, experts)
        store = {"moe_expert_store": "on-demand", "dtype": OTHERS[others]}
        flags = ("--moe-expert-store", "on-demand")
        if others != "fp32":
            flags += ("--moe-inference-dtype", others)
        found[names["perplexity"]] = perplexity(model, data, **store)
        found[names["BLEU"]] = bleu(model, data, *flags)
        file.write_text(json.dumps(found, indent=1))
        for name in names.values():
            print(f"seed {seed}, {name}: {found[name]:.2f}", flush=True)
    return found


def table(seeds: list[dict[str, Any]]) -> str:
    """Return the table with the range of errors, and the scores' means and standard deviations over seeds.

    A change in the table is the difference to the fp32 model of the same seed.
    """
    rows = []
    for experts, others in CASES:
        errors = [100 * error for found in seeds for error in found[f"{experts}, errors"]]
        low, high = (f"{each(errors, default=0):.1f}" for each in (min, max))
        shown = f"{low} %" if low == high else f"{low} to {high} %"
        row = [experts, others, BITS[experts], shown if errors else ""]
        for score, change in CHANGES.items():
            values = [found[f"{experts}, {others}, {score}"] for found in seeds]
            base = [found[f"fp32, fp32, {score}"] for found in seeds]
            changes = [change(value, first) for value, first in zip(values, base, strict=True)]
            row += [mean_of(values, 2), mean_of(changes, 2).replace("-0.00", "0.00")]
        rows.append(row)
    header = ["experts", "others", "bits per expert weight", "error of experts"]
    header += ["perplexity", "change, %", "BLEU", "change"]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Train and quantize the models, and print the table."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/quantized_quality.py DATA_BIN [OUT]")
    data, out = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "outputs/quantized_quality")
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "1 2 3").split()]
    print(table([results(data, out / f"seed-{seed}", seed) for seed in seeds]))


if __name__ == "__main__":
    main()
