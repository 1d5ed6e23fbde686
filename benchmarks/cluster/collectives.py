"""Collectives by a forest, by a ring and by gloo itself, over links that bind, beside what is predicted.

A forest's shards go along its trees whole, or in slices, one behind the other. Forests and ring are plans
over two-sided messages. Predicted is depth times alpha, and every round's busiest link (docs/plans.md), and
beside it the busiest link of all rounds together, which is what there would be if all links could always
work: of the forest of an all-gather T*, below which no schedule is.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cluster.settings import Settings
from benchmarks.cluster.timing import Step, interleaved, summary
from fairseq_tutel.parallel.links import Load
from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.executors.two_sided import TwoSided
from fairseq_tutel.plans.forestcoll.forest import grow_for
from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators.forest import forest
from fairseq_tutel.plans.generators.named import ring
from fairseq_tutel.plans.network import Network, from_json, routed

COLLECTIVES = ("all_gather", "all_reduce")
FLOAT_BYTES = 4
SLICES = 4
Form = Callable[[Tensor, Tensor], object]


def collectives(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the time of every collective by every way."""
    assert settings.collectives, "a rank gets the network that it is in"
    network = from_json(json.loads(settings.collectives[0]))
    shard_bytes = 1024 * settings.shard_kib
    alpha = alpha_of(network.ranks, settings.more_repeats)
    for collective in COLLECTIVES:
        plans = plans_of(network, collective)
        forms = {"gloo": GLOO[collective]}
        forms |= {name: by_plan(plan) for name, plan in plans.items()}
        for name, times in measured(collective, shard_bytes, forms, settings.repeats).items():
            row = {
                "section": "collectives",
                "network": network.name,
                "collective": collective,
                "shard_bytes": shard_bytes,
                "by": name,
                "alpha": alpha,
                **summary(times),
            }
            if name in plans:
                row |= predicted(network, plans[name], shard_bytes, settings.unit_mbit, alpha)
            yield row


def plans_of(network: Network, collective: str) -> dict[str, Plan]:
    """Return the plans that are compared."""
    forests = grow_for(network, collective)
    return {
        "forest": forest(collective, *forests),
        "sliced": forest(collective, *forests, slices=SLICES),
        "ring": ring(collective, network.ranks),
    }


def predicted(
    network: Network, plan: Plan, shard_bytes: int, unit_mbit: float, alpha: float
) -> dict[str, Any]:
    """Return the seconds of a plan by rounds, and by the busiest link alone.

    Args:
        network: the links.
        plan: of its ranks.
        shard_bytes: of a rank, before an all-gather.
        unit_mbit: of a link of bandwidth 1.
        alpha: seconds of a message.
    """
    size = shard_bytes * (1 if plan.collective == "all_gather" else network.ranks)
    unit = 1e6 * unit_mbit / 8
    report = check(plan)

    def over_links(load: Load) -> Load:
        return routed(network, load)

    def seconds_per_byte(link: tuple[int, int]) -> float:
        return 1 / (unit * network.matrix[link[0]][link[1]])

    loads = tuple(map(over_links, report.loads))
    return {
        "predicted": replace(report, loads=loads).predicted(size, alpha, seconds_per_byte),
        "busiest": max(
            float(part) * size * seconds_per_byte(link)
            for link, part in over_links(report.bytes_of_link).items()
        ),
        "depth": report.depth,
    }


def alpha_of(ranks: int, repeats: int) -> float:
    """Return the seconds of a message: a ring all-gather of one float per rank, divided by its depth."""
    forms = {"ring": by_plan(ring("all_gather", ranks))}
    return median(measured("all_gather", FLOAT_BYTES, forms, repeats)["ring"]) / ranks


def measured(
    collective: str, shard_bytes: int, forms: dict[str, Form], repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of every form.

    Raises:
        RuntimeError: one has given a wrong result.
    """
    ranks, rank, shard = dist.get_world_size(), dist.get_rank(), shard_bytes // FLOAT_BYTES
    owners = torch.arange(ranks, dtype=torch.float32).repeat_interleave(shard)
    own, right = owners + rank, ranks * owners + sum(range(ranks))
    if collective == "all_gather":
        own, right = torch.full((shard,), float(rank)), owners
    elif collective == "reduce_scatter":
        right = right[rank * shard : (rank + 1) * shard].clone()
    elif collective == "all_to_all":
        right = owners + rank
    outs = {name: torch.empty_like(right) for name in forms}
    steps: dict[str, Step] = {name: partial(form, own, outs[name]) for name, form in forms.items()}
    times = interleaved(steps, repeats)
    for name, out in outs.items():
        if not torch.equal(out, right):
            raise RuntimeError(f"{collective} by {name} gave a wrong result on rank {rank}.")
    return times


def by_plan(plan: Plan) -> Form:
    """Return a function that runs a plan by messages."""
    program = TwoSided(plan, None)
    shards = plan.ranks if plan.collective == "all_to_all" else 1
    return lambda own, out: program.start(own, out, min(own.numel(), out.numel()) // shards).wait()


def _all_reduce(own: Tensor, out: Tensor) -> None:
    out.copy_(own)
    dist.all_reduce(out)


GLOO: dict[str, Form] = {
    "all_gather": lambda own, out: dist.all_gather_into_tensor(out, own),
    "reduce_scatter": lambda own, out: dist.reduce_scatter_tensor(out, own),
    "all_reduce": _all_reduce,
    "all_to_all": lambda own, out: dist.all_to_all_single(out, own),
}
