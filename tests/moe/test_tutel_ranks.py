"""A layer of `ft.moe_layer` has the same outputs and gradients on several ranks as in one process."""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tutel_case import OwnExperts, alone

import fairseq_tutel as ft
from fairseq_tutel.parallel.gradients import is_expert, reduce_expert_gradients

D = 6
TOKENS = (9, 0, 7, 4)  # The number of tokens on each rank.
FFN = {"type": "ffn", "hidden_size_per_expert": 8}
KINDS = {
    "ffn": FFN,
    "activation": {**FFN, "has_fc1_bias": False, "activation_fn": torch.sin},
    "custom": {"type": "custom", "module": OwnExperts},
}


@dataclass(frozen=True)
class Case:
    kind: str = "ffn"
    per_device: float = 2
    factor: float = 0.0
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    default_group: bool = False  # Pass group=None instead of a group of all ranks.
    parallel_type: str = "adaptive:1"
    busy: bool = False  # All tokens choose experts 0 and 1 of the first rank.


@functools.cache  # Later tests reuse ranks and process groups.
def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Create a group of `ranks` and a group of all other ranks, and return the group of this rank."""
    others = tuple(r for r in range(dist.get_world_size()) if r not in ranks)
    groups = [dist.new_group(part) for part in (ranks, others) if part]
    return groups[0 if dist.get_rank() in ranks else 1]


def build(case: Case, group, per_device: float):
    gate = {"type": "top", "k": 2, "capacity_factor": case.factor}
    experts = {**KINDS[case.kind], "num_experts_per_device": per_device}
    how = {"parallel_type": case.parallel_type, "a2a_ffn_overlap_degree": 2}
    seeds = (1, dist.get_rank(), None)
    return ft.moe_layer(gate, D, experts, group=group, seeds=seeds, **how).double()


def loss_of(layer, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(TOKENS[rank], D, generator=generator, dtype=torch.float64).requires_grad_()
    y = layer(x)
    projection = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return x, y, (y * projection).sum() + y.l_aux


def compare(case: Case) -> int:
    """Compare a layer on this rank with a layer that has all experts in one process."""
    rank = dist.get_rank()
    group = None if case.default_group else group_of(case.ranks)
    members = list(range(4)) if group is None else dist.get_process_group_ranks(group)
    layer = build(case, group, case.per_device)
    whole = build(case, alone(), layer.num_global_experts)
    # A rank draws all its custom experts at once, so one process draws other values.
    if case.kind == "custom":
        parts = [None] * len(members)
        dist.all_gather_object(parts, layer.experts.W.detach(), group=group)
        distinct = parts[: layer.moe.topology.expert_parallel_size]
        whole.experts.W.data.copy_(torch.cat(distinct))
    if case.busy:
        for each in (layer, whole):
            nn.init.zeros_(each.gates[0].weight)
    for _ in range(1 if rank in case.ranks else 3):  # Ranks of other groups run more passes.
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
    """Reduce gradients as documented; compare them with 1 / `world` of the complete layer's gradients."""
    for p in layer.parameters():
        if not is_expert(p):
            dist.all_reduce(p.grad, group=group)
            p.grad /= world
    topology = layer.moe.topology
    reduce_expert_gradients(layer.parameters(), topology)
    local = topology.local_experts(layer.num_global_experts)
    for name, parameter in layer.experts.expert_parameters().items():
        expected = whole.experts.expert_parameters()[name]
        for got, values in ((parameter, expected), (parameter.grad, expected.grad / world)):
            mine = layer.experts.own_part(name, values[local.start : local.stop])
            torch.testing.assert_close(got, mine)
    torch.testing.assert_close(layer.gates[0].weight.grad, whole.gates[0].weight.grad / world)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "experts"),
    [
        ({"ranks": (0, 2), "factor": 0.5}, 4),
        ({"per_device": 1, "default_group": True}, 4),
        ({"busy": True}, 8),  # Experts of some ranks get no rows.
        ({"per_device": -2, "default_group": True}, 2),
        ({"per_device": 0.5, "parallel_type": "model"}, 2),
        ({"per_device": -2, "ranks": (1, 3), "parallel_type": "adaptive:0"}, 1),
        ({"per_device": -4, "default_group": True, "parallel_type": "adaptive:2"}, 1),
    ],
    ids=str,
)
def test_a_layer_on_a_process_group_equals_a_layer_in_one_process(ranks, kind, options, experts):
    assert ranks(4).run(compare, Case(kind=kind, **options)) == [experts] * 4


class Example(nn.Module):
    """The model of Tutel's example program, which saves one file per rank."""

    def __init__(self, kind: str, per_device: float, group=None):
        super().__init__()
        self.moe = ft.moe_layer(
            gate_type={"type": "top", "k": 2, "capacity_factor": 1.0, "fp32_gate": True},
            experts={**KINDS[kind], "num_experts_per_device": per_device},
            model_dim=D,
            scan_expert_func=lambda name, param: setattr(param, "skip_allreduce", True),
            result_func=lambda y: (y, y.l_aux),
            seeds=(1, (dist.get_rank() if dist.is_initialized() else 0) + 1, 1),
            group=group,
        )
        self.head = nn.Linear(D, D)
        self.double()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)

    def forward(self, x):
        y, l_aux = self.moe(x)
        return F.log_softmax(self.head(y).sum(dim=1), dim=1), l_aux

    def train_steps(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
            x = torch.randn(4, 5, D, generator=generator, dtype=torch.float64)
            labels = torch.randint(D, (4,), generator=generator)
            self.optimizer.zero_grad()
            output, l_aux = self(x)
            loss = F.nll_loss(output, labels) + 0.01 * l_aux
            loss.backward()
            for p in self.parameters():
                if not hasattr(p, "skip_allreduce"):
                    p.grad /= dist.get_world_size()
                    dist.all_reduce(p.grad)
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def resumed(kind: str, per_device: float, pattern: str) -> str:
    """Resume from this rank's file, and return the error that another rank's file raises."""
    rank = dist.get_rank()
    first = Example(kind, per_device)
    first.train_steps(range(2))
    torch.save([first.state_dict(), first.optimizer.state_dict()], pattern.format(rank))
    expected = first.train_steps(range(2, 4))
    second = Example(kind, per_device)
    for own, saved in zip((second, second.optimizer), torch.load(pattern.format(rank)), strict=True):
        own.load_state_dict(saved)
    assert second.train_steps(range(2, 4)) == expected
    dist.barrier()
    with pytest.raises(ValueError) as error:
        second.load_state_dict(torch.load(pattern.format(1 - rank))[0])
    return str(error.value)


@pytest.mark.parametrize("kind", ("ffn", "custom"))
def test_each_rank_of_tutels_example_resumes_only_from_its_file(ranks, tmp_path, kind):
    for message in ranks(2).run(resumed, kind, 2, str(tmp_path / "{}")):
        assert "hold the experts of another rank" in message


def opened(path: str) -> Tensor:
    model = Example("ffn", 1)
    model.load_state_dict(torch.load(path))
    return model.moe.experts.fc1_weight.detach()


def test_each_rank_loads_its_experts_from_a_file_with_all_experts(ranks, tmp_path):
    one = Example("ffn", 2)
    torch.save(one.state_dict(), tmp_path / "all")
    parts = ranks(2).run(opened, str(tmp_path / "all"))
    assert torch.equal(torch.cat(parts), one.moe.experts.fc1_weight)


def test_num_experts_per_device_that_does_not_fit_the_number_of_ranks_raises_an_error(ranks):
    with pytest.raises(AssertionError, match="num_experts_per_device is -3 on 4 ranks"):
        ranks(4).run(build, Case(), None, -3)
