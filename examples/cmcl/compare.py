"""Compare independent ensembles, multiple choice learning and confident multiple choice learning on digits.

    make vision-data && python examples/cmcl/compare.py vision OUT [--sets digits] [--seeds 1 2] [--print]

fairseq-train trains each method of METHODS with each seed on the data of digits.py, and validates the model
on the test split. Nothing is selected on the test split. Finished runs are skipped. Then a table is printed
with means and standard deviations over seeds, in percent. With --print, nothing is trained.
"""

import argparse
import json
import os
import re
import statistics
import sys
from pathlib import Path

from tabulate import tabulate

HERE = Path(__file__).parent
SHARED = "--ensemble-share-after hidden"
METHODS = {
    "independent": "--cmcl-overlap 5",
    "MCL, k = 1": "--cmcl-overlap 1 --cmcl-beta 0",
    "CMCL, k = 1": "--cmcl-overlap 1",
    "CMCL, k = 1, stochastic": "--cmcl-overlap 1 --cmcl-stochastic",
    "CMCL, k = 4": "--cmcl-overlap 4",
    "CMCL, k = 4, stochastic": "--cmcl-overlap 4 --cmcl-stochastic",
    "independent, shared features": f"--cmcl-overlap 5 {SHARED}",
    "CMCL, k = 4, shared features": f"--cmcl-overlap 4 {SHARED}",
}
SETS = {
    "digits": "--tiny-side 8 --tiny-hidden 32 --max-epoch 30 --validate-interval 30",
    "mnist_5k": "--tiny-side 14 --tiny-hidden 64 --max-epoch 8 --validate-interval 8",
}
ALL = (
    "--task image_classification --arch ensemble_of --ensemble-arch tiny_mlp --ensemble-size 5 "
    "--criterion cmcl --optimizer adam --lr 0.003 --batch-size 64 --valid-subset test --no-save "
    "--num-workers 0 --log-format json --log-interval 1000 --required-batch-size-multiple 1"
)
COLUMNS = ("accuracy", "oracle_error", "member_accuracy")


def train(data: Path, log: Path, options: str, seed: int) -> None:
    """Train in a forked child process, because this process has already imported fairseq; write a log."""
    child = os.fork()
    if child == 0:
        log.parent.mkdir(parents=True, exist_ok=True)
        unfinished = log.with_suffix(".part")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = [
            "fairseq-train",
            str(data),
            "--user-dir",
            str(HERE),
            *ALL.split(),
            *options.split(),
        ]
        sys.argv += ["--seed", str(seed)]
        from fairseq_cli.train import cli_main

        cli_main()
        unfinished.rename(log)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"the training that wrote {log.with_suffix('.part')} failed")


def numbers(log: Path) -> list[float]:
    """Return a run's errors in percent: of the mean of softmaxes, of the oracle, and of a member."""
    record = json.loads(re.findall(r"\| test \| (\{.*\})", log.read_text())[-1])
    accuracy, oracle, member = (float(record[f"test_{name}"]) for name in COLUMNS)
    return [100 - accuracy, oracle, 100 - member]


def row(logs: list[Path]) -> list[str]:
    """Return the mean and standard deviation of each number over seeds."""
    columns = zip(*map(numbers, logs), strict=True)
    return [f"{statistics.mean(c):.2f} ± {statistics.stdev(c) if len(c) > 1 else 0:.2f}" for c in columns]


def main() -> None:
    """Train the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    if not given.print:
        import fairseq_cli.train  # noqa: F401 - the first to be imported sets the format of the log
        import torch
        import torch._dynamo  # torch's optimizers import this module, which takes seconds

        from fairseq_tutel.plugin import register

        torch.set_num_threads(1)
        register()
    for name in given.sets:
        logs = {
            (method, seed): given.out / name / re.sub(r"\W+", "_", method) / f"{seed}.log"
            for seed in given.seeds
            for method in METHODS
        }
        for (method, seed), log in logs.items():
            if not log.exists() and not given.print:
                train(given.data / name, log, f"{METHODS[method]} {SETS[name]}", seed)
        done = {
            method: [log for (of, _), log in logs.items() if of == method and log.exists()]
            for method in METHODS
        }
        rows = [[method, len(found), *(row(found) if found else [])] for method, found in done.items()]
        print(f"\n{name}, error in percent\n")
        print(
            tabulate(rows, ("method", "seeds", "mean of softmaxes", "oracle", "a member"), "github"),
            flush=True,
        )


if __name__ == "__main__":
    main()
