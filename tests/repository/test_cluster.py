"""The emulated cluster, by its command: what it measures, and that it leaves nothing behind.

Covered: the tables and the file of a small run, and that links limit what crosses nodes; no namespace
after a run that ends or loses a rank; the ranks of a killed run end,
and the next run removes its namespaces; a delay, by its messages; which choices are compared last;
collectives over a network's links take what they can; no right to make namespaces, which also skips these
tests, with the reason.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fairseq_tutel.planning.strategy import Strategy

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.cluster"]
COLLECTIVES = ("all_gather", "all_reduce")
SMALL = [
    *("--repeats", "1", "--model-dim", "16", "--tokens", "8"),
    *("--hidden-dim", "16", "--overlap-hidden-dim", "16", "--overlap-tokens", "8"),
    *("--overlaps", "1", "2", "--sizes-kib", "16", "64", "--rate-mbit", "100"),
]


def start(*words):
    """Start a run; read its output with `communicate`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*COMMAND, *SMALL, *words], cwd=ROOT, **pipes)


def run(*words):
    """Run to the end; return its code, output and errors. Skips where nothing may be measured."""
    process = start(*words)
    output, errors = process.communicate(timeout=120)
    skip_as(output)
    return process.returncode, output, errors


def skip_as(output):
    """Skip a test where the command has said that it may not measure."""
    if output.startswith("skipped:"):
        pytest.skip(f"not run: {output}")


def namespaces(process):
    """Return the namespaces that a run has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return re.findall(rf"moe-cluster-{process.pid}-\w+", listed)


def folders(process):
    """Return the folders that a run has made."""
    return list(Path(tempfile.gettempdir()).glob(f"moe-cluster-{process.pid}-*"))


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


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return output and file of one run of two nodes of two ranks, of all sections."""
    path = tmp_path_factory.mktemp("cluster") / "out.json"
    code, output, errors = run("--nodes", "2", "--local", "2", "--json", str(path))
    assert code == 0, errors
    return output, json.loads(path.read_text())


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


@pytest.mark.long
def test_every_section_has_its_rows(measured):
    output, found = measured
    assert found["config"]["nodes"] == 2 and found["config"]["rate_mbit"] == 100
    keys = ("nodes", "local", "algorithm", "bytes_per_rank")
    assert [tuple(row[key] for key in keys) for row in found["a2a"]] == [
        (2, 2, algorithm, kib * 1024) for kib in (16, 64) for algorithm in ("linear", "2dh")
    ]
    assert all(0 < row["seconds_min"] <= row["seconds"] for row in found["a2a"])
    # d = 1 and 2 of experts that compute, and of three that sleep.
    assert [row["overlap"] for row in found["overlap"]] == [1, 2] * 4
    # r = 0 once; r = 1 and 2 with two d and two algorithms; experts that compute, and that sleep.
    assert len(found["static"]) == 2 * (1 + 2 * 2 * 2)
    assert [(row["form"], row["settled"]) for row in found["tuner"]] == [
        ("compute", True),
        ("sleep", True),
    ]
    for row in found["tuner"]:
        assert 1 <= row["measured_again"] <= 7 and row["regret"] >= 0
    for heading in ("linear / 2dh", "by forward and backward", "r=2 d=2 2dh", "paper: to 1.74x"):
        assert heading in output


@pytest.mark.long
def test_links_limit_what_crosses_nodes_and_nothing_else(measured):
    mbit = {(row["where"], row["bytes"]): row["mbit"] for row in measured[1]["links"]}
    large = max(num_bytes for _, num_bytes in mbit)
    assert mbit["between nodes", large] < 110
    assert mbit["within a node", large] > 220


def test_a_run_that_loses_a_rank_says_so_and_leaves_nothing(started):
    process = started()
    os.kill(ranks_in(1, process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rank 1 ended with code -9" in errors
    assert namespaces(process) == []


@pytest.mark.long
def test_a_delay_is_paid_for_every_message_and_a_killed_run_is_swept(started, tmp_path):
    killed = started()
    killed.kill()
    wait_until(lambda: not ranks_in(0, killed) + ranks_in(1, killed), seconds=5)
    assert len(namespaces(killed)) == 3 and folders(killed)
    killed.wait()
    words = ("--nodes", "2", "--local", "2", "--sections", "a2a", "--delay-us", "50000")
    code, _, errors = run(*words, "--json", str(tmp_path / "out.json"))
    assert code == 0, errors
    assert namespaces(killed) == folders(killed) == []
    for row in json.loads((tmp_path / "out.json").read_text())["a2a"]:
        # To the other node's two ranks, or to one of them.
        assert row["seconds_min"] >= {"linear": 0.1, "2dh": 0.05}[row["algorithm"]]


@pytest.mark.long
def test_collectives_take_what_their_links_allow(tmp_path):
    words = ("--collectives", "benchmarks/cluster/line.json", "--shard-kib", "128")
    code, output, errors = run(*words, "--json", str(tmp_path / "out.json"))
    assert code == 0, errors
    rows = json.loads((tmp_path / "out.json").read_text())["collectives"]
    assert [(row["collective"], row["by"]) for row in rows] == [
        (collective, by)
        for collective in COLLECTIVES
        for by in ("forest", "sliced", "ring", "gloo")
    ]
    for row in rows:
        # At 16 Mbit/s; what a link lets through at once after a pause is a tenth of a message at most.
        least = {"all_gather": 2, "all_reduce": 3}[row["collective"]] * 128 * 1024 / 2e6
        assert row["seconds"] > 0.9 * least
    assert "line of 3" in output


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
    done = subprocess.run(
        COMMAND, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: ") and "no ip" in done.stdout
