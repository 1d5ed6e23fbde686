"""Links and all-to-alls: speed of the network, then linear against 2DH over message sizes."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import fairseq_tutel as ft
from benchmarks.cluster.settings import Settings
from benchmarks.cluster.timing import Step, interleaved, summary
from fairseq_tutel.parallel import exchange
from fairseq_tutel.parallel.strategy import Strategy

ROW_FLOATS = 256
ROW_KIB = ROW_FLOATS * 4 / 1024  # float32
SMALL_KIB, LARGE_KIB = 16, 2048


def links(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield what a pair of ranks takes for a message each way, within a node and between two nodes.

    All pairs send at once, so between nodes L pairs share a link.
    """
    kinds = {"between nodes": (settings.local, settings.local)}
    if settings.local > 1:
        kinds["within a node"] = (1, 1)
    for where, (distance, sharing) in kinds.items():
        pairs = _pairs(settings.world_size, settings.local, distance)
        groups = {pair: dist.new_group(pair) for pair in pairs}
        mine = next((group for pair, group in groups.items() if dist.get_rank() in pair), None)
        for kib in (SMALL_KIB, LARGE_KIB):
            (times,) = interleaved({where: _swap(kib, mine)}, settings.more_repeats).values()
            row = {"section": "links", "where": where, "bytes": 1024 * kib, **summary(times)}
            row["mbit"] = sharing * kib * 1024 * 8 / row["seconds"] / 1e6
            yield row


def _swap(kib: int, pair: dist.ProcessGroup | None) -> Step:
    """Return a step that sends a message to the other of a pair, and gets one; None has no partner."""
    blocks = torch.zeros(2, kib * 256)
    out = torch.empty_like(blocks)

    def step() -> None:
        if pair is not None:
            dist.all_to_all_single(out, blocks, group=pair)

    return step


def _pairs(world: int, local: int, distance: int) -> list[tuple[int, int]]:
    """Return pairs of ranks, none in two: neighbours of a node, or alike ranks of two nodes."""
    if distance == 1 and local > 1:
        firsts = [r for r in range(world) if r % local % 2 == 0 and r % local + 1 < local]
    else:
        firsts = [r for r in range(world - distance) if r // distance % 2 == 0]
    return [(r, r + distance) for r in firsts]


def all_to_alls(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the time of an all-to-all of even rows, by size and algorithm.

    It is half of an exchange there and back with nothing between, regrouping included.
    """
    world = settings.world_size
    topology = ft.make_topology([world], world, settings.local)
    for kib in settings.sizes_kib:
        per_rank = max(1, round(kib / ROW_KIB / world))
        rows = torch.randn(per_rank * world, ROW_FLOATS)
        counts = torch.full((world,), per_rank)
        steps = {a: _there_and_back(rows, counts, topology, a) for a in settings.algorithms}
        for algorithm, times in interleaved(steps, settings.more_repeats).items():
            yield {
                "section": "a2a",
                "nodes": settings.nodes,
                "local": settings.local,
                "algorithm": algorithm,
                "bytes_per_rank": rows.numel() * rows.element_size(),
                **summary([seconds / 2 for seconds in times]),
            }


def _there_and_back(
    rows: torch.Tensor, counts: torch.Tensor, topology: ft.Topology, algorithm: str
) -> Step:
    options = exchange.ExchangeOptions(
        group=topology.expert_group, grid=topology.grid, strategy=Strategy(algorithm=algorithm), padded=True
    )

    def step() -> None:
        with torch.no_grad():
            exchange.exchange_rows(rows, counts, options, lambda received, *_: received)

    return step
