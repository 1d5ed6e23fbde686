"""Ranks that may die or stop: what those that live on say, and how long that takes."""

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
    """Stop this process: its connections stay open and nothing is answered."""
    os.kill(os.getpid(), signal.SIGSTOP)


def run(
    function: Callable, world_size: int, survivors: Sequence[int], *args: Any
) -> tuple[list[str], float]:
    """Call function(rank, *args) on fresh ranks, joined by gloo and by a TCP store in rank 0.

    Returns:
        said: of each survivor, "NameOfError: message", or what was returned as a string.
        seconds: from the moment that all ranks had met to the last survivor's word.
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
        for pipe in pipes:  # before that nobody may end: the others could not meet it
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
    os._exit(0)  # torch's own clean-up may wait for the dead
