"""Run command-line tools as a user would, and show what they do while they do it."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


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
