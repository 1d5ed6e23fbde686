"""A resume: the place in an epoch that other ranks began, and the look at the file."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.output import Row

BATCHES = 100_000
NODES = (1, 8, 64)


class _Nothing(torch.utils.data.Dataset):
    supports_prefetch = False

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return BATCHES


def elastic_resumes(quick: bool) -> Iterator[Row]:
    """Yield how long a rank takes to find its place in an epoch that other numbers of ranks began."""
    from fairseq_tutel.plugin.training.epoch_iterator import ElasticEpochBatchIterator

    batches = [[i] for i in range(1000 if quick else BATCHES)]
    for saved in (4, 8) if quick else (8, 64, 512):
        iterator = ElasticEpochBatchIterator(_Nothing(), list, batches, num_shards=2 * saved, shard_id=1)
        state = {"epoch": 1, "iterations_in_epoch": 10, "shuffle": True, "order_shards": saved,
                 "global_batches": 10 * saved}  # fmt: skip
        start = time.process_time()
        iterator.load_state_dict(state)
        yield {
            "variant": f"saved by {saved} ranks",
            "ranks": saved,
            "mode": "resume",
            "status": "ok",
            "seconds": time.process_time() - start,
        }


def looks(quick: bool) -> Iterator[Row]:
    """Yield how much of a checkpoint on a disk that all nodes share is read before it is loaded."""
    from fairseq_tutel.parallel import world
    from fairseq_tutel.plugin.training import resume

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"a": torch.zeros((1 if quick else 16) * 2**18)}, path)
        for nodes in NODES[:2] if quick else NODES:
            ranks, reads = _Threads(nodes), []

            def read(path: str, reads: list[str] = reads) -> bool:
                reads.append(path)
                return True

            start = time.process_time()
            with (
                mock.patch.object(world, "dist", ranks),
                mock.patch.object(resume.files, "is_whole", read),
                mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}),
            ):
                ranks.run(lambda: resume._found_by_all(str(path)))
            yield {
                "variant": f"{nodes} nodes",
                "nodes": nodes,
                "status": "ok",
                "seconds": time.process_time() - start,
                "reads": len(reads),
                "note": f"read {len(reads)} times",
            }


class _Threads(SimpleNamespace):
    """What the look uses of torch.distributed, for a thread a node."""

    def __init__(self, world: int) -> None:
        super().__init__(told=[None] * world, barrier=threading.Barrier(world))
        self.of_thread = threading.local()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self, group: None) -> int:
        return len(self.told)

    def get_rank(self) -> int:
        return self.of_thread.rank

    def all_gather_object(self, out: list[Any], own: Any, group: None) -> None:
        self.told[self.get_rank()] = own
        self.barrier.wait()
        out[:] = self.told
        self.barrier.wait()

    def run(self, action: Any) -> None:
        def act(rank: int) -> None:
            self.of_thread.rank = rank
            action()

        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(self.told))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
