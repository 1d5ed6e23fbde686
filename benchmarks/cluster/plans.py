"""Collective plans between nodes, by gloo's messages."""

from collections.abc import Iterator
from typing import Any

from benchmarks.cluster.collectives import (
    GLOO,
    SLICES,
    alpha_of,
    by_plan,
    measured,
    predicted,
)
from benchmarks.cluster.settings import Settings
from benchmarks.cluster.timing import summary
from fairseq_tutel.plans.forestcoll.forest import grow_for
from fairseq_tutel.plans.generators import make
from fairseq_tutel.plans.generators.forest import forest
from fairseq_tutel.plans.network import find

# The bandwidth inside a node, in units of that between nodes.
INSIDE = 10


def plans(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the time of each plan by size, and gloo's own."""
    ranks = settings.world_size
    network = find(f"cluster:{settings.nodes}x{settings.local}:{INSIDE}:1")
    alpha = alpha_of(ranks, settings.more_repeats)
    for collective in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        if collective == "all_to_all":
            found = {
                "linear": make("linear", collective, ranks),
                "two_hops": make("two_hops", collective, ranks, nodes=settings.nodes),
            }
        else:
            forests = grow_for(network, collective)
            found = {
                "forest": forest(collective, *forests),
                "sliced": forest(collective, *forests, slices=SLICES),
            }
        forms = {"gloo": GLOO[collective]}
        for name, plan in found.items():
            forms[name] = by_plan(plan)
        for kib in settings.sizes_kib:
            shard_bytes = 1024 * kib // ranks
            for name, times in measured(collective, shard_bytes, forms, settings.more_repeats).items():
                row = {
                    "section": "plans",
                    "nodes": settings.nodes,
                    "local": settings.local,
                    "collective": collective,
                    "bytes": shard_bytes * ranks,
                    "by": name,
                    **summary(times),
                }
                if name != "gloo":
                    row |= predicted(network, found[name], shard_bytes, settings.rate_mbit, alpha)
                yield row
