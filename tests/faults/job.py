"""One training by fairseq's command line, watched so that nothing can hang: forked ranks, or torchrun."""

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cli import start
from launchers import launch, torchrun
from models import lm_args

from fairseq_tutel.parallel import guard, rendezvous

from .plan import MICRO_BATCHES, SAVE_EVERY, Fault

PLACES = str(Path(__file__).parent / "faulty_places")
# A machine with more ranks than cores is slow to start them, and to end them.
START_SECONDS = 90.0
SLACK_SECONDS = 15.0
SGD = ("--optimizer", "moe_sgd", "--momentum", 0.9, "--lr", 0.5)
# Ports are drawn from one generator.
_starting = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A training that has ended or was ended.

    Attributes:
        exit_codes: by rank; what the fault or the watch killed has -9.
        logs: by rank.
        fired: whether the fault happened.
        hung: ranks that were still running at their deadline.
        seconds: from the fault, or without one from the start, to the end of the last rank.
    """

    exit_codes: list[int]
    logs: list[str]
    fired: bool
    hung: list[int]
    seconds: float


def allowance(timeout: float) -> float:
    """Return the seconds that ranks have from a fault to their end: the deadline of a trial.

    A collective waits for --moe-comm-timeout, and a rendezvous longer by a margin. Then ranks run a health
    check, and the rank that keeps the store leaves last.
    """
    health_check = min(timeout, guard.LONGEST_CHECK) + 2 * guard.GRACE_SECONDS
    return timeout + rendezvous.WATCH_SECONDS + health_check + SLACK_SECONDS


def words_of(
    data: Path, save_dir: Path, ranks: int, flags: Sequence[str], updates: int, timeout: float, *extra: str
) -> list[Any]:
    """Return the command line of a training; see `train`."""
    return lm_args(
        data, save_dir, "--user-dir", PLACES, "--moe-comm-timeout", int(timeout), "--batch-size", 8,
        "--save-interval-updates", SAVE_EVERY, "--moe-micro-batches", MICRO_BATCHES,
        *([] if "--optimizer" in flags else SGD),
        *flags, *extra, updates=updates,
    )  # fmt: skip


def train(
    data: Path,
    save_dir: Path,
    ranks: int,
    flags: tuple[str, ...],
    updates: int,
    timeout: float,
    fault: Fault | None = None,
    extra: tuple[str, ...] = (),
) -> Job:
    """Run a training to its end, or to its deadline.

    Args:
        data: a binarized corpus.
        save_dir: of its checkpoints; it goes on from what is there.
        ranks: W.
        flags: of the trial.
        updates: where it stops.
        timeout: --moe-comm-timeout.
        fault: what happens to a rank.
        extra: more flags.
    """
    fault = fault or Fault()
    marker = save_dir.parent / f"fired-{time.monotonic_ns()}"
    what = {**asdict(fault), "marker": str(marker), "save_dir": str(save_dir)}
    words = words_of(data, save_dir, ranks, flags, updates, timeout, *extra)
    env = {"FAULT": json.dumps(what)}
    started: list[Any]
    with _starting:
        if fault.target == "torchrun":
            log = save_dir.parent / "torchrun.log"
            launcher = torchrun(ranks, "--signals-to-handle", "SIGTERM,SIGUSR1", "--max-restarts", 1)
            started = [(launch(launcher, words, log, env), log)]
        else:
            started = start("train", *words, ranks=ranks, env=env)
    job = _watch(started, fault, marker, allowance(timeout))
    marker.unlink(missing_ok=True)
    return job


def _watch(started: list[Any], fault: Fault, marker: Path, allowed: float) -> Job:
    """Wait for all ranks; strike at the fault's time; end who is stopped, or late."""
    processes = [process for process, _ in started]
    begin, fired, hung = time.monotonic(), None, []
    while alive := [rank for rank, process in enumerate(processes) if process.is_alive()]:
        now = time.monotonic()
        if fired is None and marker.exists():
            fired = now
            if fault.target != "rank":  # a rank that came by the place has struck itself
                itself = fault.rank if fault.target == "all" else None
                _strike([p for rank, p in enumerate(processes) if rank != itself], fault)
        late = now > fired + allowed if fired else now > begin + START_SECONDS + allowed
        # Nothing wakes a stopped rank but a launcher, when the others have ended.
        waited_for = [r for r in alive if not (fired and fault.what == "stop" and r == fault.rank)]
        if late or not waited_for:
            hung = waited_for
            for rank in alive:
                processes[rank].kill()
                processes[rank].join()
        time.sleep(0.02)
    for process in processes:
        process.join()
    return Job(
        exit_codes=[process.exitcode for process in processes],
        logs=[log.read_text() if log.exists() else "" for _, log in started],
        fired=fired is not None,
        hung=hung,
        seconds=time.monotonic() - (fired or begin),
    )


def _strike(processes: Sequence[Any], fault: Fault) -> None:
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(fault.what) or signal.Signals[
        fault.detail
    ]
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, number)
