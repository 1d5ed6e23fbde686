"""Experts in shard files, who writes them and what a load opens; and ZeRO's buckets, by the cost model."""

import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
import torch
from torch import Tensor, nn

from benchmarks.output import Row
from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.checkpoint import experts as written
from fairseq_tutel.checkpoint.shards import Piece, ShardedTensor, bind
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.links import all_gather_seconds
from fairseq_tutel.parallel.machine import PRESETS
from fairseq_tutel.parallel.zero_partition import partitions_of

EXPERTS, LAYERS, STATES = 64, 24, ("exp_avg", "exp_avg_sq", "fp32_master")
WORLDS, LARGE_WORLDS = (64, 512), (64, 512, 4096)
LOCAL = 8
# Gradients of a dense part of 0.55 B parameters in bf16, in matrices of 8 MiB.
MATRICES, NUMEL = 132, 4 * 2**20


def shards(quick: bool) -> Iterator[Row]:
    """Yield who writes 64 experts in each of 24 layers, and what a rank that reads all opens."""
    experts, layers = (4, 2) if quick else (EXPERTS, LAYERS)
    for world in (4, 8) if quick else WORLDS:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "experts" / "0123456789abcdef"
            folder.mkdir(parents=True)
            parts, files, told = [], [], []
            for first in range(experts):
                part = Topology(world_size=world, rank=first, expert_parallel_size=experts)
                model = _model(part, experts, layers)
                for rank in range(first, world, experts):
                    place = Topology(world_size=world, rank=rank, expert_parallel_size=experts)
                    own = written.CopiedExperts(model, place, _states).write(folder, lambda: None)
                    parts.append(own)
                    files.append(len(own.sizes))
                    told.append(len(pickle.dumps(own)))
            # Objects are gathered in buffers as long as the longest.
            gathered = world * max(told)
            yield {
                "variant": f"written by {world} ranks",
                "mode": "save",
                "ranks": world,
                "status": "ok",
                "files": sum(files),
                "writers": sum(map(bool, files)),
                "most_files": max(files),
                "gathered_bytes": gathered,
                "note": f"{sum(map(bool, files))} ranks write, {max(files)} files at most; each is told "
                f"{gathered / 1e6:.1f} MB",
            }
            if world == WORLDS[0] or (quick and world == 4):
                yield _load(Path(root), folder, written._joined(parts, folder))


def _model(place: Topology, experts: int, layers: int) -> nn.Module:
    config = MoEConfig(model_dim=4, hidden_dim=4, num_experts=experts)
    return nn.Sequential(*(MoELayer(config, place, seed=1, name=str(i)) for i in range(layers)))


def _states(parameter: nn.Parameter) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name in STATES}


def _load(root: Path, folder: Path, tensors: dict[Any, dict[tuple[int, int], Piece]]) -> Row:
    state = {
        f"{stack.layer}.{stack.name}": ShardedTensor(
            root=root, folder=f"experts/{folder.name}", shape=stack.shape, dtype=stack.dtype,
            slicing=stack.slicing, pieces=tuple(pieces[order] for order in sorted(pieces)),
        ).record()
        for stack, pieces in tensors.items()
    }  # fmt: skip
    path, opened, safe_open = root / "checkpoint.pt", [], safetensors.safe_open
    torch.save(state, path)

    def count(*args: object, **options: object) -> object:
        opened.append(args)
        return safe_open(*args, **options)

    start = time.process_time()
    with mock.patch.object(safetensors, "safe_open", count):
        state = torch.load(path)
        bind(state, path)
        for tensor in state.values():
            tensor.whole()
    return {
        "variant": "read by one rank",
        "mode": "load",
        "status": "ok",
        "seconds": time.process_time() - start,
        "opens": len(opened),
        "record_bytes": path.stat().st_size,
        "note": f"{len(opened):,} files opened; the records are {path.stat().st_size / 1e6:.1f} MB",
    }


def zero_buckets(quick: bool) -> Iterator[Row]:
    """Yield the model's time of ZeRO's reduce-scatters, beside that of one bucket of everything."""
    machine, num_bytes = PRESETS["h100"], 2 * MATRICES * NUMEL
    for world in (8, 16) if quick else LARGE_WORLDS:
        parameters = [
            nn.Parameter(torch.empty(NUMEL, dtype=torch.bfloat16, device="meta")) for _ in range(MATRICES)
        ]
        _, buckets = partitions_of(parameters, Topology(world_size=world))
        nodes, each = world // LOCAL, num_bytes / world
        seconds, least = (
            number * all_gather_seconds(each / number, machine, nodes, LOCAL)
            for number in (len(buckets), 1)
        )
        yield {
            "variant": f"{world} ranks",
            "ranks": world,
            "status": "ok",
            "seconds": seconds,
            "buckets": len(buckets),
            "least_seconds": least,
            "note": f"model: {len(buckets)} buckets; {1000 * least:.1f} ms as one",
        }
