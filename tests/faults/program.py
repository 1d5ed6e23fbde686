"""Run trials side by side, and print what came of them by kind of fault."""

import argparse
import concurrent.futures
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from corpora import language
from tabulate import tabulate

from . import disk, plan, trial


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials that the command line asks for; return the exit status.

    Returns:
        0 where every trial ended rightly; 1 where one hung, lost something or ended unclearly.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Trainings of 1 to 4 ranks, each hit by one random fault and then gone on with.",
    )
    parser.add_argument("--trials", type=int, default=300, help="how many (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first trial; the others' follow (default: 0)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="side by side (default: %(default)s)")
    parser.add_argument(
        "--comm-timeout", type=int, default=6, help="--moe-comm-timeout (default: %(default)s)"
    )
    parser.add_argument(
        "--format", nargs="+", default=list(plan.FORMATS), choices=plan.FORMATS,
        help="forms of checkpoints to draw from: a file, shards, or shards by threads (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--plans", nargs="+", default=plan.PLANS, choices=plan.PLANS,
        help="how collectives run to draw from: no plans, in shared memory, by messages (default: all)",
    )  # fmt: skip
    parser.add_argument("--kind", help="only trials of kinds that have this in their name")
    parser.add_argument("--json", type=Path, help="write all trials to this file")
    parser.add_argument("--logs", type=Path, help="folder for what all ranks print")
    options = parser.parse_args(argv)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        results = run_all(_seeds(options), options, Path(folder))
    print(_table(results))
    print(f"full disk: {'a small tmpfs' if disk.can_mount() else 'a limit on the size of files'}")
    bad = [result for result in results if result.problems]
    for result in bad:
        _tell(result, options)
    minutes = (time.monotonic() - start) / 60
    print(f"{len(results)} trials in {minutes:.1f} minutes, {len(bad)} with problems")
    if options.json:
        rows = [{k: v for k, v in asdict(r).items() if k != "logs"} for r in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if bad else 0


def run_all(seeds: Sequence[int], options: argparse.Namespace, folder: Path) -> list[trial.Result]:
    """Run the trials of the seeds, `options.jobs` at a time; a line for each as it ends."""
    os.environ["FAIRSEQ_TUTEL_TEST_LOGS"] = str(folder / "logs")
    (folder / "corpus").mkdir()
    world = trial.World(language(folder / "corpus"), folder, options.comm_timeout)
    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        drawn_from = options.comm_timeout, tuple(options.format), tuple(options.plans)
        trials = [plan.draw(seed, *drawn_from) for seed in seeds]
        running = [pool.submit(trial.run, each, world) for each in trials]
        for ended in concurrent.futures.as_completed(running):
            results.append(ended.result())
            print(_line(results[-1]), flush=True)
            _keep(results[-1], options.logs)
    return sorted(results, key=lambda result: result.trial.seed)


def _seeds(options: argparse.Namespace) -> list[int]:
    kinds = plan.kinds()
    seeds, seed = [], options.seed
    while len(seeds) < options.trials:
        if options.kind is None or options.kind in kinds[seed % len(kinds)]:
            seeds.append(seed)
        seed += 1
        if seed - options.seed >= len(kinds) and not seeds:
            sys.exit(f"--kind is {options.kind}; the kinds are {', '.join(kinds)}.")
    return seeds


def _keep(result: trial.Result, folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for number, log in enumerate(result.logs):
            (folder / f"{result.trial.seed}-{number}.log").write_text(log)


def _line(result: trial.Result) -> str:
    each = result.trial
    words = [f"seed {each.seed}:", each.kind, f"W {each.ranks}", *each.flags, result.outcome]
    words += ["(not reached)"] * (not result.fired) + [f"{result.seconds:.1f} s"]
    words += [f"went on with W {each.ranks_after}"] * result.resumed
    words += ["same weights"] * (result.compared and not result.problems)
    return " ".join([*words, *(f"PROBLEM: {text}" for text in result.problems)])


def _table(results: Sequence[trial.Result]) -> str:
    rows = []
    for kind in plan.kinds():
        of_kind = [result for result in results if result.trial.kind == kind]
        if of_kind:
            rows.append(_row(kind, of_kind))
    rows.append(_row("all", results))
    return tabulate(rows, headers="keys")


def _row(name: str, results: Sequence[trial.Result]) -> dict[str, object]:
    good = [result for result in results if not result.problems]
    return {
        "fault": name,
        "trials": len(results),
        "ended clearly": sum(result.outcome == "ended" for result in good),
        "preempted": sum(result.outcome == "preempted" for result in good),
        "went on": sum(result.outcome == "went on" for result in good),
        "not reached": sum(not result.fired for result in results),
        "resumed": sum(result.resumed for result in good),
        "same weights": sum(result.compared for result in good),
        "longest, s": round(max(result.seconds for result in results if result.fired or len(results)), 1),
        "problems": len(results) - len(good),
    }


def _tell(result: trial.Result, options: argparse.Namespace) -> None:
    each = result.trial
    drawn_from = f"--format {' '.join(options.format)} --plans {' '.join(options.plans)}"
    print(f"\nseed {each.seed}: {each}")
    for problem in result.problems:
        print(f"  {problem}")
    print(f"  again: python -m tests.faults --trials 1 --seed {each.seed} {drawn_from}")
