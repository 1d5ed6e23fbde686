"""Starts ranks on this machine, and connects them by gloo."""

import shutil
import tempfile
from datetime import timedelta

import forkserver
import torch.distributed as dist
from workers import Workers


class Ranks(Workers):
    """Holds processes in which torch.distributed is initialised; `run` calls a function on every rank.

    With `on_gpus` the processes can use `python_gpu`.
    """

    def __init__(self, world_size: int, on_gpus: bool = False) -> None:
        self.folder: str | None = None
        setup = join_on_gpus if on_gpus else join
        super().__init__(world_size, setup, self._meeting_point, forkserver.context())

    def close(self) -> None:
        """End the ranks, and remove the rendezvous file."""
        super().close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _meeting_point(self) -> tuple[int, str]:
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        return self.count, f"file://{self.folder}/store"


def join(rank: int, world_size: int, init_method: str) -> None:
    """Initialise torch.distributed in this process."""
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def join_on_gpus(*args) -> None:
    """Register `python_gpu` before autograd starts its threads, and initialise torch.distributed."""
    import python_gpu

    python_gpu.register()
    join(*args)
