"""The 2-D hierarchical all-to-all is bit-identical to the linear all-to-all."""

import pytest
import torch
import torch.distributed as dist

from fairseq_tutel.parallel import all_to_all
from fairseq_tutel.parallel.call_id import CallCounter, CallId
from fairseq_tutel.parallel.groups import make_topology

# Each entry has the number of ranks, the size of an EP group, and the number of ranks per node.
LONG = [pytest.param(*s, marks=pytest.mark.long) for s in ((6, 6, 2), (6, 6, 3), (8, 4, 2))]
SPLITS = [(4, 4, 2), *LONG]
MODEL_DIM, EXPERTS_PER_RANK = 3, 2
EVEN = 2


def counts_of(rank, parallel, seed):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    counts = torch.randint(0, 4, (parallel, EXPERTS_PER_RANK), generator=generator)
    if seed == 1 and rank == 1:
        counts.zero_()  # This rank sends no rows.
    return torch.full_like(counts, 3) if seed == EVEN else counts


def compare_exchanges(parallel, local, dtype, seed):
    """Send this rank's rows through both all-to-all algorithms; return each one's results and gradients."""
    rank = dist.get_rank()
    topology = make_topology([parallel * EXPERTS_PER_RANK], parallel, local)
    counts = counts_of(rank, parallel, seed)
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(int(counts.sum()), MODEL_DIM, generator=generator)
    rows = (100 * rows).to(dtype)
    results = []
    call_id = CallId(CallCounter(topology.expert_group, "a test", EXPERTS_PER_RANK))
    group, grid = topology.expert_group, topology.grid
    agreed, _ = all_to_all.exchange_counts(counts, group, "a test", call_id)
    in_hops, _ = all_to_all.exchange_counts(counts, group, "a test", call_id, grid)
    assert torch.equal(in_hops.arriving_PE, agreed.arriving_PE)
    for forth, back in (
        all_to_all.linear(agreed, group, "a test"),
        all_to_all.hierarchical(in_hops, in_hops, grid, "a test"),
    ):
        rows_exchange = all_to_all.AllToAll(forth=forth, back=back)
        x = rows.clone().requires_grad_(dtype.is_floating_point)
        there = rows_exchange.dispatch(x)
        returned = rows_exchange.combine(there * 2)
        if dtype.is_floating_point:
            (returned * torch.arange(len(returned)).unsqueeze(1)).sum().backward()
        grad = x.grad if x.grad is not None else torch.zeros(0)
        results.append((there.detach(), returned.detach(), grad))
    return results


CASES = (
    (torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 1), (torch.int64, 0), (torch.bfloat16, EVEN),
)  # fmt: skip


def compare_all(parallel, local):
    return [compare_exchanges(parallel, local, dtype, seed) for dtype, seed in CASES]


@pytest.mark.parametrize("world, parallel, local", SPLITS)
def test_the_hierarchical_all_to_all_equals_the_linear_all_to_all(ranks, world, parallel, local):
    for cases in ranks(world).run(compare_all, parallel, local):
        for linear, hierarchical in cases:
            for expected, got in zip(linear, hierarchical, strict=True):
                assert torch.equal(got, expected)
        assert len(cases[0][0][0]) > 0


def test_the_hierarchical_all_to_all_transposes_blocks_of_equal_size_without_row_maps(monkeypatch):
    monkeypatch.setattr(all_to_all, "regroup_maps", None)
    counts_AB, rows = torch.full((2, 3), 2), torch.arange(12).unsqueeze(1)
    forth, back = all_to_all._regrouping(counts_AB, counts_AB)
    assert forth(rows).flatten().tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert torch.equal(back(forth(rows)), rows)


def grids(locals_):
    return [make_topology([4], 0, local).grid is None for local in locals_]


def test_the_hierarchical_all_to_all_needs_experts_on_several_complete_nodes(ranks):
    # The ranks per node are 1, 3 (which does not divide 4), 4 or 8 (one node), and 0 (unknown nodes).
    assert ranks(4).run(grids, (1, 3, 4, 8, 0)) == [[True] * 5] * 4
