"""Run command-line tools as a user would, and show what they do while they do it."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

# The first updates allocate memory and warm up; they say nothing about speed.
UNTIMED_UPDATES = 10


def run(tool: str, arguments: Sequence[str], log: Path, show: str) -> str:
    """Run a tool of this environment and return all that it said, which `log` keeps.

    fairseq says much more than one wants to read: of its lines, what the groups of the regular
    expression `show` match is printed.
    """
    command = [os.path.relpath(Path(sys.executable).with_name(tool)), *arguments]
    print(f"\n$ {shlex.join(command)}", flush=True)
    with (
        open(log, "w", encoding="utf-8") as kept,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # Python holds back what goes into a pipe
        ) as child,
    ):
        for line in child.stdout or ():
            kept.write(line)
            if found := re.search(show, line):
                print(" ", *filter(None, found.groups()), flush=True)

    output = log.read_text(encoding="utf-8")
    if child.returncode != 0:
        sys.exit(f"{output[-3000:]}\n{tool} failed with exit code {child.returncode}; see {log}")
    return output


def train(name: str, arguments: Sequence[str], out: Path, show: str) -> float:
    """Train the model `name`, whose checkpoints and logs go to `out`; return its speed, of `wps`."""
    statistics = statistics_of(name, out)
    places = ["--save-dir", str(out / name), "--log-file", str(statistics)]
    run("fairseq-train", [*arguments, *places], out / f"train-{name}.log", show)
    return _median_speed(statistics)


def report(names: Sequence[str], out: Path) -> Path:
    """Draw the trainings, over one another, on one page; return its place."""
    page = out / "report.html"
    arguments = ["-m", "fairseq_tutel", "report", "--output", str(page)]
    arguments += [f"--name={name}" for name in names]
    arguments += [str(statistics_of(name, out)) for name in names]
    run("python", arguments, out / "report.log", show=r"(.+)")
    return page


def statistics_of(name: str, out: Path) -> Path:
    """Return the file of a training's records."""
    return out / f"train-{name}.json"


def _median_speed(statistics: Path) -> float:
    """The median over the entries of a training log; each times the updates since the last one.

    A median, since other work on the machine spoils some entries and must not spoil the result.
    """
    with open(statistics, encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines if line.startswith('{"epoch"')]
    return median(
        float(entry["wps"])
        for entry in entries
        if "wps" in entry and int(entry["num_updates"]) > UNTIMED_UPDATES
    )
