"""The emulated cluster, by its command: its measurements, and that it leaves no files behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fairseq_tutel.parallel.strategy import Strategy

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.cluster"]
SMALL = [
    *("--repeats", "1", "--model-dim", "16", "--tokens", "8"),
    *("--hidden-dim", "16", "--overlap-hidden-dim", "16", "--overlap-tokens", "8"),
    *("--overlaps", "1", "2", "--sizes-kib", "16", "64", "--rate-mbit", "100"),
]


def start(*words):
    """Start a run; read its output with `communicate`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, *SMALL, *words], cwd=ROOT, **pipes)


def skip_as(output):
    """Skip a test where the command has said that it may not measure."""
    if output.startswith("skipped:"):
        pytest.skip(f"not run: {output}")


def namespaces(process):
    """Return the namespaces that a run has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return re.findall(rf"moe-cluster-{process.pid}-\w+", listed)


def ranks_in(node, process):
    """Return the processes in a node of a run."""
    name = f"moe-cluster-{process.pid}-node{node}"
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {seconds} seconds"
        time.sleep(0.05)


@pytest.fixture
def started():
    """Return a function that starts a run and waits until its ranks are there."""
    runs = []

    def begin(*words):
        process = start("--nodes", "2", "--local", "1", "--sections", "links", *words)
        runs.append(process)
        wait_until(lambda: process.poll() == 0 or all(ranks_in(node, process) for node in (0, 1)))
        if process.poll() == 0:
            skip_as(process.communicate()[0])
        return process

    yield begin
    for process in runs:
        process.kill()
        process.communicate()


def test_a_run_that_loses_a_rank_says_so_and_leaves_nothing(started):
    process = started()
    os.kill(ranks_in(1, process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rank 1 ended with code -9" in errors
    assert namespaces(process) == []


def test_the_last_comparison_is_of_all_that_may_be_the_best(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.cluster.tuning import close_to_best, repeats_of

    static = {Strategy(overlap=d): 1.0 + 0.05 * d for d in range(1, 10)}
    # 1.05 is the least, so 1.2 is within 15 % of it and 1.25 is not.
    assert close_to_best(static) == [Strategy(overlap=d) for d in (1, 2, 3, 4)]
    alike = {Strategy(overlap=d): 1.0 + 0.001 * d for d in range(9, 0, -1)}
    assert close_to_best(alike) == [Strategy(overlap=d) for d in range(1, 7)]
    # About the time of two choices, whatever their number.
    assert [repeats_of(number) for number in (1, 2, 4, 7)] == [8, 4, 2, 2]


def test_without_the_means_it_skips_with_the_reason():
    environment = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run(COMMAND, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: ") and "no ip" in done.stdout
