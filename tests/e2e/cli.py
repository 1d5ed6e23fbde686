"""Runs fairseq's real command lines in tests without importing fairseq for each run.

A fork server imports fairseq and the plugin's modules once. Each rank of a run is a child process of the
fork server. Each rank calls `cli_main` with separate arguments, environment and log. A training command
without --user-dir must not load the plugin, so it runs in a new process. If a run has several ranks, each
rank gets torchrun's environment variables.
"""

import json
import multiprocessing
import os
import re
import sys
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import forkserver
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
USER_DIR = str(ROOT / "user_dir")
HYDRA = str(ROOT / "configs" / "hydra")
TIMEOUT_S = 150
GRACE_S = 15

_context = forkserver.context()
_stock = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Run:
    """The exit codes and logs of all ranks of a finished command, in the order of ranks."""

    exit_codes: list[int]
    logs: list[str]
    seconds: float

    @property
    def ok(self):
        return all(code == 0 for code in self.exit_codes)

    @property
    def output(self):
        return "\n".join(self.logs)

    def stats(self, tag):
        """Return the JSON records that rank 0 logged under `tag` (train_inner, train or valid)."""
        found = re.findall(rf"\| {tag} \| (\{{.*\}})", self.logs[0])
        return [json.loads(text) for text in found]


def fairseq(command, *args, ranks=1, check=True, env=None, stdin=None):
    """Run fairseq-`command` in `ranks` processes and wait; `check` asserts that all exit codes are 0.

    The command "tutel-NAME" runs `python -m fairseq_tutel.NAME`. The command "tutel-__main__" runs the
    tools of `fairseq-tutel`.
    """
    run = wait(start(command, *args, ranks=ranks, env=env, stdin=stdin))
    if check:
        assert run.ok, f"fairseq-{command} ended with {run.exit_codes}:\n{tail(run.output)}"
    return run


def refused(command, *args, **kwargs):
    """Run a command that must end with an error; return its output.

    After the first failure of a rank, the other ranks are killed, as torchrun does.
    """
    started = start(command, *args, **kwargs)
    connection.wait([process.sentinel for process, _ in started], TIMEOUT_S)
    for process, _ in started:
        process.join(GRACE_S)
        process.kill()
    run = wait(started)
    failed = any(code > 0 for code in run.exit_codes)
    assert failed, f"fairseq-{command} was not refused:\n{tail(run.output)}"
    return run.output


def start(command, *args, ranks=1, env=None, stdin=None):
    """Start a command; return a list of (process, log file), which `wait` takes.

    The processes run in the folder of the logs, because fairseq and hydra write to the current directory.
    """
    argv = [f"fairseq-{command}", *map(str, args)]
    if command in ("generate", "eval-lm", "validate") and "--num-workers" not in argv:
        argv += ["--num-workers", "0"]  # commands without worker processes start faster
    is_stock = command == "train" and "--user-dir" not in argv
    base = {"OMP_NUM_THREADS": "1", **(env or {})}
    directory = Path(_scratch())
    started = []
    port = free_port()
    for rank in range(ranks):
        extra = {} if ranks == 1 else torchrun_environment(rank, ranks, port)
        log = directory / f"{command}-{time.monotonic_ns()}-{rank}.log"
        arguments = (command, argv, {**base, **extra}, str(log), stdin)
        process = (_stock if is_stock else _context).Process(target=_child, args=arguments)
        process.start()
        started.append((process, log))
    return started


def start_each(command, *arguments):
    """Start a command on several ranks, with one list of arguments per rank."""
    ranks, port = len(arguments), free_port()
    return [
        started
        for rank, args in enumerate(arguments)
        for started in start(command, *args, env=torchrun_environment(rank, ranks, port))
    ]


def wait(started, timeout=TIMEOUT_S):
    """Wait for all ranks of a command; kill the ranks that still run after `timeout` seconds, and fail."""
    begin = time.monotonic()
    for process, _ in started:
        process.join(max(0.1, timeout - (time.monotonic() - begin)))
    hung = [process.pid for process, _ in started if process.is_alive()]
    for process, _ in started:
        process.kill()
        process.join()
    logs = [log.read_text() if log.exists() else "" for _, log in started]
    assert not hung, f"still running after {timeout} s: {hung}\n{tail(logs[0])}"
    codes = [process.exitcode for process, _ in started]
    return Run(exit_codes=codes, logs=logs, seconds=time.monotonic() - begin)


def torchrun_environment(rank, ranks, port):
    """Return the environment variables that torchrun sets for a rank."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def tail(text, lines=40):
    """Return the last lines of a log, which contain the errors."""
    return "\n".join(text.splitlines()[-lines:])


def _scratch():
    path = Path(os.environ["FAIRSEQ_TUTEL_TEST_LOGS"])
    path.mkdir(parents=True, exist_ok=True)
    return path


def _child(command, argv, env, log, stdin):
    import atexit
    import importlib
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    torch.set_num_threads(1)
    os.environ.update(env)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(Path(log).parent)
    if stdin is not None:
        sys.stdin = open(stdin)  # noqa: SIM115 - open until the process ends
    sys.argv = argv
    if "fairseq_tutel.plugin" in sys.modules:  # register() must run again, with these arguments
        sys.modules["fairseq_tutel.plugin"].register.cache_clear()
    try:
        if command.startswith("tutel-"):
            importlib.import_module("fairseq_tutel." + command.removeprefix("tutel-")).main()
        else:
            importlib.import_module("fairseq_cli." + command.replace("-", "_")).cli_main()
    finally:
        atexit._run_exitfuncs()  # a forked child process skips exit handlers
