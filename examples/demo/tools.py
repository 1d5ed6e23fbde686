"""Run command-line tools and show their progress."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

# The first updates allocate memory and warm up; they do not represent the speed.
UNTIMED_UPDATES = 10


def run(tool: str, arguments: Sequence[str], log: Path, show: str) -> str:
    """Run a tool of this environment, write its output to `log`, and return it.

    Only the groups of the regular expression `show` are printed, because fairseq's output is long.
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
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # otherwise Python buffers output to a pipe
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
    """Train the model `name`, write checkpoints and logs to `out`, and return its speed, from `wps`."""
    statistics = statistics_of(name, out)
    places = ["--save-dir", str(out / name), "--log-file", str(statistics)]
    run("fairseq-train", [*arguments, *places], out / f"train-{name}.log", show)
    return _median_speed(statistics)


def report(names: Sequence[str], out: Path) -> Path:
    """Draw the runs on one page; return its path."""
    page = out / "report.html"
    arguments = ["-m", "fairseq_tutel", "report", "--output", str(page), "--overwrite"]
    arguments += [f"--name={name}" for name in names]
    arguments += [str(statistics_of(name, out)) for name in names]
    run("python", arguments, out / "report.log", show=r"(.+)")
    return page


def statistics_of(name: str, out: Path) -> Path:
    """Return the log file of a run."""
    return out / f"train-{name}.json"


def _median_speed(statistics: Path) -> float:
    """Return the median speed over the entries of a training log.

    Entries that are slow because of other processes do not affect the median.
    """
    with open(statistics, encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines if line.startswith('{"epoch"')]
    return median(
        float(entry["wps"])
        for entry in entries
        if "wps" in entry and int(entry["num_updates"]) > UNTIMED_UPDATES
    )
