"""Print the tables of examples/vision.sh: python examples/vision_table.py DATA OUT.

The tables have the accuracy on the test split in percent: means over seeds with standard deviations. The
first table has every model without dropping, the second MoE models with limited capacity by drop policy.
"against" is the difference to the dense model with the same seed.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from routing_table import mean_of
from tabulate import tabulate

USER_DIR = Path(__file__).resolve().parents[1] / "user_dir"
# Cases and their labels.
CASES = {
    "dense": "dense",
    "moe": "MoE, linear gate",
    "cosine": "MoE, cosine gate",
    "position": "MoE, linear gate, trained without BPR",
}
FACTORS = (0.25, 0.5, 1.0, 1.25)
POLICIES = {"bpr": "BPR", "position": "none"}
# Slots are assigned within a batch.
BATCH = 100


@torch.no_grad()
def accuracy(run: Path, data: str, **overrides: Any) -> float:
    """Return the percentage of the test split that a model gets right, with some options changed."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(run / "checkpoint_last.pt")], {"data": data, **overrides}
    )
    task.load_dataset("test")
    dataset = task.dataset("test")
    model.eval()
    right = 0
    for start in range(0, len(dataset), BATCH):
        rows = range(start, min(start + BATCH, len(dataset)))
        sample = dataset.collater([dataset[i] for i in rows])
        logits_BC = model(**sample["net_input"])
        right += int((logits_BC.argmax(1) == sample["target"]).sum())
    return 100 * right / len(dataset)


def main(data: str, out: Path) -> None:
    """Print both tables."""
    logging.disable(logging.INFO)
    utils.import_user_module(argparse.Namespace(user_dir=str(USER_DIR)))
    runs = {name: sorted(path.parent for path in out.glob(f"{name}-*/done")) for name in CASES}
    found = {name: [accuracy(run, data) for run in each] for name, each in runs.items() if each}
    rows = []
    for name, each in found.items():
        against = [a - b for a, b in zip(each, found.get("dense", ()), strict=False)]
        difference = mean_of(against, 2) if against and name != "dense" else ""
        rows.append([CASES[name], str(len(each)), mean_of(each, 2), difference])
    header = ["model", "seeds", "accuracy, %", "against"]
    print(tabulate(rows, header, tablefmt="github", disable_numparse=True))

    rows = []
    for name, policy in ((n, p) for n in ("moe", "position") if runs[n] for p in POLICIES):
        options = [{"moe_eval_capacity_factor": f, "moe_drop_policy": policy} for f in FACTORS]
        cells = [mean_of([accuracy(run, data, **o) for run in runs[name]], 1) for o in options]
        trained = POLICIES["position" if name == "position" else "bpr"]
        rows.append([trained, POLICIES[policy], *cells, mean_of(found[name], 1)])
    header = ["trained with", "evaluated with", *map(str, FACTORS), "no dropping"]
    print("\n" + tabulate(rows, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
