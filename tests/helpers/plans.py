"""Makes collective plans for tests of executors, and computes the expected results."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.executors.layout import Layout, Sizes, walk
from fairseq_tutel.plans.executors.two_sided import add_up
from fairseq_tutel.plans.files import PlacedPlan
from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators import GENERATORS, make


def of(ranks: int) -> list[Plan]:
    """Return plans of all generators for a number of ranks; plans that depend on nodes have two nodes."""
    return [
        make(name, collective, ranks, nodes=2 if generator.has_nodes else 1)
        for name, generator in GENERATORS.items()
        for collective in generator.collectives
        if not (ranks % 2 and generator.has_nodes)
    ]


def placed(*plans: Plan) -> list[PlacedPlan]:
    """Return plans in the form that is read from files such as `two_phase_all_reduce.json`."""
    return [PlacedPlan(plan.name.replace(" ", "_"), plan, check(plan)) for plan in plans]


def result(plan: Plan, sizes: Sizes, ins: Sequence[Tensor]) -> list[Tensor]:
    """Return each rank's `out` after all moves of the plan, which run in sequence in one process."""
    walked = walk(plan)
    layout, like = Layout(walked, sizes), ins[0]
    memory = [
        {"in": own}
        | {b: like.new_full((layout.starts(rank, b)[-1], *like.shape[1:]), -1) for b in ("out", "tmp")}
        for rank, own in enumerate(ins)
    ]
    for move in walked.moves:
        for ends, n in layout.runs(move.kinds, *move.sources, move.target):
            *parts, out = (memory[rank][buffer][at : at + n] for rank, buffer, at in ends)
            add_up(parts, out)
    return [each["out"] for each in memory]


def wanted(plan: Plan, ins: Sequence[Tensor]) -> list[Tensor]:
    """Return the result of the plan's collective on each rank, with sums in rank order."""
    n = plan.ranks
    if plan.collective == "all_gather":
        return [torch.cat(list(ins))] * n
    if plan.collective == "all_reduce":
        total = torch.empty_like(ins[0])
        add_up(ins, total)
        return [total] * n
    shards = [own.view(n, -1, *own.shape[1:]) for own in ins]
    if plan.collective == "all_to_all":
        return [torch.cat([shard[r] for shard in shards]) for r in range(n)]
    outs = [torch.empty_like(shards[0][r]) for r in range(n)]
    for r, out in enumerate(outs):
        add_up([shard[r] for shard in shards], out)
    return outs


def inputs(plan: Plan, m: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return each rank's random input, with shards of m elements."""
    generator = torch.Generator().manual_seed(m)
    shards = plan.in_chunks // plan.chunks
    return [
        (100 * torch.randn(shards * m, *shape, generator=generator)).to(dtype) for _ in range(plan.ranks)
    ]
