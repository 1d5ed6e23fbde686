"""After a rank fails, all other ranks end, even if they wait in C code."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import forkserver
import mortal
import pytest
import torch.distributed as dist
from ports import free_port

from fairseq_tutel.parallel import failures, world
from fairseq_tutel.parallel.signals import EXIT_CODE, SignalWatch

PROGRAM = Path(__file__).parents[1] / "helpers" / "blocked_rank.py"
SECONDS = 60
KILLED = "rank 2 ended without an error message, as after SIGKILL"


def test_torchrun_ranks_that_wait_in_c_code_end_with_one_sentence_each():
    """Rank 2 raises an error, and is killed after a restart; torchrun sends SIGTERM to the other ranks."""
    flags = ("--nproc_per_node", "4", "--max-restarts", "1", "--master_port", str(free_port()))
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 7, done.stderr
    for rank in (0, 1, 3):
        for reason in ("rank 2 failed: a broken sample.", KILLED):
            assert sum(e.startswith(f"error: rank {rank} ends, because {reason}") for e in errors) == 1
    codes = [line.split()[2] for line in done.stderr.splitlines() if "exitcode  :" in line]
    assert sorted(codes) == ["-9", "1", "1", "1"]
    assert "received SIGTERM" not in done.stderr


def _blocked(rank, victim, fate, port, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    failures._machine = lambda: "a" if rank == 0 else "b"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=3)
    with world.ending_together("a test"):
        failures.look()  # After this call, the failure watch has registered this process.
        dist.barrier()
        if rank == victim:
            fate()
        while True:
            ctypes.CDLL(None).usleep(900_000)


def _fail():
    raise KeyError("a broken sample")


def _has_too_little_time():
    with SignalWatch(["SIGTERM"], 0):
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            ctypes.CDLL(None).usleep(900_000)


def _run(function, world_size, folder, *args):
    """Run a function on several ranks, and return the exit codes and the stderr texts of the ranks."""
    port, logs = free_port(), [folder / str(rank) for rank in range(world_size)]
    processes = [
        forkserver.context().Process(target=function, args=(rank, *args, port, logs[rank]))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
        process.join()
    return [process.exitcode for process in processes], [log.read_text() for log in logs]


@pytest.mark.parametrize(
    ("victim", "fate", "code", "reason"),
    [
        (2, mortal.die, -signal.SIGKILL, KILLED),
        (2, _fail, 1, "rank 2 failed: KeyError: 'a broken sample'"),
        (0, mortal.die, -signal.SIGKILL, "rank 0, which runs the rendezvous store, has ended"),
        (0, _fail, 1, "rank 0 failed: KeyError: 'a broken sample'"),
        (0, _has_too_little_time, EXIT_CODE, "rank 0 received SIGTERM and could not end within 0 s"),
    ],
)
def test_a_failure_ends_ranks_on_other_machines_that_get_no_signal(victim, fate, code, reason, tmp_path):
    codes, logs = _run(_blocked, 3, tmp_path, victim, fate)
    assert codes.pop(victim) == code and codes == [1, 1]
    for rank in {0, 1, 2} - {victim}:
        errors = [line for line in logs[rank].splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and errors[0].startswith(f"error: rank {rank} ends, because {reason}")


def _hangs(rank, port, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    failures.END_SECONDS = 0.2
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    try:
        with world.ending_together("a test"):
            _fail()
    finally:
        while True:  # The loop simulates a destructor that waits for the GPU.
            ctypes.CDLL(None).usleep(900_000)


def test_a_rank_that_hangs_after_its_error_is_ended(tmp_path):
    codes, logs = _run(_hangs, 2, tmp_path)
    assert codes == [1, 1]
    assert "error: rank 1 could not end within 0.2 s after its error" in logs[1]


def _ends(rank, how, scheme, port, log):
    def record(name):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            with open(log, "a") as file:
                file.write(f"{name}\n")
            return original(*args, **kwargs)

        setattr(dist, name, call)

    open(log, "w").close()
    address = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{log.parent}/store"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    record("all_gather_object")
    record("destroy_process_group")
    with world.ending_together("a test"):
        if how is not None:
            sys.exit(how)


@pytest.mark.parametrize(
    ("how", "code", "scheme"),
    [(None, 0, "tcp"), (EXIT_CODE, EXIT_CODE, "file"), ("error: no.", 1, "tcp")],
)
def test_ranks_destroy_process_groups_at_the_end_unless_a_rank_failed(how, code, scheme, tmp_path):
    codes, calls = _run(_ends, 2, tmp_path, how, scheme)
    assert codes == [code] * 2
    assert calls == ["" if code == 1 else "all_gather_object\ndestroy_process_group\n"] * 2
