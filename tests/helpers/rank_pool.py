"""W ranks joined by gloo on this machine."""

import shutil
import tempfile
from datetime import timedelta

import forkserver
import torch.distributed as dist
from workers import Workers


class Ranks(Workers):
    """`run` calls a function on every rank; inside, torch.distributed is initialised."""

    def __init__(self, world_size: int) -> None:
        self.folder: str | None = None
        super().__init__(world_size, join, self._meeting_point, forkserver.context())

    def close(self) -> None:
        """End the ranks and remove their meeting point."""
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
