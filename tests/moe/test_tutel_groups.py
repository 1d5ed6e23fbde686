"""`fairseq_tutel.moe_layer` in process groups: outputs and gradients of one process with all experts."""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tutel_case import OwnExperts, alone

import fairseq_tutel as ft
from fairseq_tutel.parallel.gradients import is_expert, reduce_expert_gradients

D = 6
TOKENS = (9, 0, 7, 4)  # by rank


FFN = {"type": "ffn", "hidden_size_per_expert": 8}
KINDS = {
    "ffn": FFN,
    "output": {**FFN, "output_dim": 4, "activation_fn": torch.sin},
    "custom": {"type": "custom", "module": OwnExperts},
}


@dataclass(frozen=True)
class Case:
    kind: str = "ffn"
    per_device: float = 2
    factor: float = 0.0
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    default_group: bool = False  # None instead of a group that holds all ranks
    seed_by_rank: bool = False
    parallel_type: str = "adaptive:1"
    busy: bool = False  # all tokens go to experts 0 and 1, the first rank's


@functools.cache  # groups outlive a test, as the ranks do
def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return this rank's group among those of `ranks` and of all others."""
    others = tuple(r for r in range(dist.get_world_size()) if r not in ranks)
    groups = [dist.new_group(part) for part in (ranks, others) if part]
    return groups[0 if dist.get_rank() in ranks else 1]


def build(case: Case, group, per_device: float, seed: int):
    gate = {"type": "top", "k": 2, "capacity_factor": case.factor}
    experts = {**KINDS[case.kind], "num_experts_per_device": per_device}
    how = {"parallel_type": case.parallel_type, "a2a_ffn_overlap_degree": 2}
    return ft.moe_layer(gate, D, experts, group=group, seeds=(1, seed, None), **how).double()


def loss_of(layer, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(TOKENS[rank], D, generator=generator, dtype=torch.float64).requires_grad_()
    y = layer(x)
    projection = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return x, y, (y * projection).sum() + y.l_aux


def compare(case: Case) -> int:
    """Check this rank's part of a group's layer against the whole in one process."""
    rank = dist.get_rank()
    group = None if case.default_group else group_of(case.ranks)
    members = list(range(4)) if group is None else dist.get_process_group_ranks(group)
    layer = build(case, group, case.per_device, 3 + rank if case.seed_by_rank else 3)
    whole = build(case, alone(), layer.num_global_experts, 3 + members[0] if case.seed_by_rank else 3)
    if case.kind == "custom":  # each rank draws its modules at once: not the same experts
        parts = [None] * len(members)
        dist.all_gather_object(parts, layer.experts.W.detach(), group=group)
        distinct = parts[: layer.topology.expert_parallel_size]
        whole.experts.W.data.copy_(torch.cat(distinct))
    if case.busy:
        for each in (layer, whole):
            nn.init.zeros_(each.gates[0].weight)
    for _ in range(1 if rank in case.ranks else 3):  # no rank waits for another group
        layer.zero_grad()
        x, y, loss = loss_of(layer, rank)
        loss.backward()
    x0, y0, loss0 = loss_of(whole, rank)
    loss0.backward()
    torch.testing.assert_close((y, y.l_aux, x.grad), (y0, y0.l_aux, x0.grad))
    torch.testing.assert_close(layer.gates[0].weight.grad, whole.gates[0].weight.grad)
    for other in members:
        if other != rank:
            loss_of(whole, other)[2].backward()
    check_experts(layer, whole, len(members), group)
    return layer.num_global_experts


def check_experts(layer, whole, world: int, group) -> None:
    """Reduce as the documentation says, and compare with the whole's sum over W."""
    for p in layer.parameters():
        if not is_expert(p):
            dist.all_reduce(p.grad, group=group)
            p.grad /= world
    reduce_expert_gradients(layer.parameters(), layer.topology)
    local = layer.topology.local_experts(layer.num_global_experts)
    for name, parameter in layer.experts.expert_parameters().items():
        expected = whole.experts.expert_parameters()[name]
        for got, values in ((parameter, expected), (parameter.grad, expected.grad / world)):
            mine = layer.experts.own_part(name, values[local.start : local.stop])
            torch.testing.assert_close(got, mine)
    torch.testing.assert_close(layer.gates[0].weight.grad, whole.gates[0].weight.grad / world)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", (0.0, 0.5))
def test_a_group_of_two_in_four_ranks_is_one_process_with_its_experts(ranks, kind, factor):
    case = Case(kind=kind, factor=factor, ranks=(0, 1))
    assert ranks(4).run(compare, case) == [4] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_are_one_process_with_all_experts(ranks, kind):
    assert ranks(4).run(compare, Case(kind=kind, per_device=1, default_group=True)) == [4] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_whose_experts_get_no_rows_still_takes_part(ranks, kind):
    assert ranks(4).run(compare, Case(kind=kind, busy=True)) == [8] * 4


def test_a_group_need_not_hold_neighbours(ranks):
    assert ranks(4).run(compare, Case(ranks=(0, 2))) == [4] * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("per_device", "options", "experts"),
    [
        (-2, {"default_group": True}, 2),
        (0.5, {}, 2),
        (-2, {"ranks": (1, 3)}, 1),
        (-4, {"default_group": True}, 1),
        (-2, {"parallel_type": "model"}, 2),
        (-2, {"parallel_type": "adaptive:0", "ranks": (0, 2)}, 1),
    ],
)
def test_one_expert_over_several_ranks(ranks, kind, per_device, options, experts):
    case = Case(kind=kind, per_device=per_device, seed_by_rank=True, **options)
    assert ranks(4).run(compare, case) == [experts] * 4


def slices_of(kind, per_device, hidden):
    experts = {**KINDS[kind], "num_experts_per_device": per_device}
    if hidden:
        experts["hidden_size_per_expert"] = hidden
    layer = ft.moe_layer({"type": "top"}, D, experts, seeds=(1, 2, None))
    x = torch.randn(3, D)
    layer.eval()
    ways = [layer(x, adaptive_r=r, a2a_ffn_overlap_degree=d) for r in (0, 1, 2) for d in (1, 3)]
    for y in ways:
        torch.testing.assert_close(y, layer(x))
    return layer.experts.part.slices


def test_an_expert_is_cut_where_its_ranks_divide_it_and_whole_on_each_otherwise(ranks):
    assert ranks(4).run(slices_of, "ffn", -2, 0) == [2] * 4
    assert ranks(4).run(slices_of, "output", -2, 0) == [2] * 4
    assert ranks(4).run(slices_of, "ffn", -2, 7) == [1] * 4
    assert ranks(4).run(slices_of, "custom", -2, 0) == [1] * 4


def outside() -> str:
    both = dist.new_group([0, 1])
    try:
        build(Case(), both, 2, 3)
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_outside_the_group_and_a_number_that_does_not_divide_are_refused(ranks):
    messages = ranks(4).run(outside)
    assert messages[:2] == ["", ""]
    assert all("give a process group that this rank is in, or None" in m for m in messages[2:])
    with pytest.raises(AssertionError, match="one expert on every 3 ranks, but there are 4 ranks"):
        ranks(4).run(build, Case(), None, -3, 3)
