"""Starts a process for every rank in its node's namespace, and ends them all whatever happens."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.cluster import network
from benchmarks.cluster.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PORT = 29500
Row = dict[str, Any]


class RankError(RuntimeError):
    """A rank failed, or the time was up; `rows` is what had been measured."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


def run(settings: Settings) -> list[Row]:
    """Run all ranks in a network that exists, and return their measurements.

    Raises:
        RankError: a rank ended with an error, or `limit_s` was not enough.
    """
    with TemporaryDirectory(prefix=f"{network.PREFIX}-{os.getpid()}-") as folder:
        results = Path(folder, "rows.jsonl")
        results.touch()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(settings.world_size):
                processes.append(_start(rank, settings, Path(folder)))
            trouble = _wait(processes, settings, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        rows = [json.loads(line) for line in results.read_text().splitlines()]
    if trouble:
        raise RankError(trouble, rows)
    return rows


def _start(rank: int, settings: Settings, folder: Path) -> "subprocess.Popen[bytes]":
    node = rank // settings.local
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": network.INTERFACE,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(settings.world_size),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT),
    }
    command = [
        # Ranks end with this process, even where it is killed.
        *("setpriv", "--pdeathsig", "KILL"),
        *("ip", "netns", "exec", network.namespace(node)),
        *(sys.executable, "-m", "benchmarks.cluster.rank", settings.to_json()),
        str(folder / "rows.jsonl"),
    ]
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def _wait(processes: "list[subprocess.Popen[bytes]]", settings: Settings, folder: Path) -> str | None:
    """Wait for all; return what went wrong, if anything did."""
    end = time.monotonic() + settings.limit_s
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            # One of them logs the reason; the others log only that it is gone.
            return "\n".join(
                f"rank {rank} ended with code {codes[rank]}: {_log(folder, rank).read_text()[-2000:]}"
                for rank in failed
            )
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)
    return f"--limit-s is {settings.limit_s:g}, which was not enough; give more, or fewer --sections."


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"
