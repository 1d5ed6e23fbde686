"""Runs ranks that may die or stop; returns the results of the surviving ranks and the elapsed time."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import forkserver
import torch.distributed as dist
from ports import free_port

SECONDS = 30


def die() -> None:
    """End this process as the kernel's out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Suspend this process: its connections stay open, but it answers no message."""
    os.kill(os.getpid(), signal.SIGSTOP)


def run(
    function: Callable, world_size: int, survivors: Sequence[int], *args: Any
) -> tuple[list[str], float]:
    """Call function(rank, *args) on new ranks, which are connected by gloo and a TCP store in rank 0.

    Returns:
        said: for each survivor, the result as a string, or "NameOfError: message".
        seconds: time from the end of the rendezvous until the last survivor's result.
    """
    context, port = forkserver.context(), free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        here, there = context.Pipe()
        arguments = (there, function, rank, world_size, port, args)
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    try:
        for pipe in pipes:
            assert _next(pipe) == "met"
        start = time.monotonic()
        for pipe in pipes:  # no rank may end before the rendezvous is complete
            pipe.send("go")
        said = [_next(pipes[rank]) for rank in survivors]
        return said, time.monotonic() - start
    finally:
        for process in processes:
            process.kill()
            process.join()


def _next(pipe: Any) -> str:
    assert pipe.poll(SECONDS), f"no word in {SECONDS} s"
    return pipe.recv()


def _rank(pipe: Any, function: Callable, rank: int, world_size: int, port: int, args: tuple):
    init_method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    pipe.send("met")
    pipe.recv()
    try:
        pipe.send(str(function(rank, *args)))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # torch's clean-up at exit could wait for dead ranks
