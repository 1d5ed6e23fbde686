"""A layer whose experts are on several ranks equals a layer on one rank with all experts."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.parallel.call_id import CallCounter, CallId
from fairseq_tutel.parallel.exchange import ExchangeOptions, agreed_capacity
from fairseq_tutel.parallel.regroup import regroup_maps

CONFIG = MoEConfig(model_dim=6, hidden_dim=5, num_experts=4, activation="gelu")

# These are the numbers of tokens on each rank.
UNEVEN = (9, 4, 7, 1)
NOBODY_ON_RANK_1 = (6, 0, 5, 3)


@dataclasses.dataclass(frozen=True)
class Case:
    """Describes one comparison by each rank's tokens, the number of EP ranks, and the layer's options."""

    tokens: tuple[int, ...] = UNEVEN
    parallel: int = 0
    options: tuple[tuple[str, object], ...] = ()
    one_expert: bool = False
    padding_rank: int | None = None
    dtype: torch.dtype = torch.float64


def inputs(case: Case, rank: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(case.tokens[rank], CONFIG.model_dim, generator=generator, dtype=torch.float64)
    mask = None
    if case.padding_rank is not None:
        mask = torch.full((len(x),), rank == case.padding_rank)
    return x.to(case.dtype).requires_grad_(), mask


def layers(case: Case) -> tuple[MoELayer, MoELayer]:
    """Return a layer with experts spread over ranks, and an equal layer with all experts on each rank."""
    topology = make_topology([CONFIG.num_experts], case.parallel)
    config = dataclasses.replace(CONFIG, **dict(case.options))
    both = [MoELayer(config, where, seed=3).to(case.dtype) for where in (topology, None)]
    for layer in both:
        if case.one_expert:  # All scores are equal, so tokens choose expert 0 first, then expert 1.
            torch.nn.init.zeros_(layer.gate.weight)
    return both[0], both[1]


def project(y: Tensor, output) -> Tensor:
    weights = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)
    return (y.double() * weights).sum() + output.balance_loss.double()


def compare_with_one_rank(case: Case) -> None:
    split, whole = layers(case)
    topology, rank = split.topology, dist.get_rank()
    tolerance = 1e-12 if case.dtype == torch.float64 else 5e-2

    def close(got: Tensor, expected: Tensor, what: str) -> None:
        torch.testing.assert_close(
            got.double(),
            expected.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m: f"rank {rank}, {what}: {m}",
        )

    x, mask = inputs(case, rank)
    y, output = split(x, mask)
    project(y, output).backward()
    x_whole = x.detach().clone().requires_grad_()
    y_whole, output_whole = whole(x_whole, mask)
    project(y_whole, output_whole).backward()
    close(y, y_whole, "y")
    close(output.balance_loss, output_whole.balance_loss, "balance loss")
    assert torch.equal(output.routing.row_of_TK >= 0, output_whole.routing.row_of_TK >= 0)
    close(x.grad, x_whole.grad, "gradient of x")
    close(split.gate.weight.grad, whole.gate.weight.grad, "gradient of the gate")
    mine = slice(split.experts.first, split.experts.first + split.experts.num_local)
    for name, parameter in whole.experts.expert_parameters().items():
        # The gradient of an expert is the sum over the tokens of all ranks of the EP group.
        total = parameter.grad.double()
        if topology.expert_group is not None:
            dist.all_reduce(total, group=topology.expert_group)
        close(split.experts.expert_parameters()[name].grad, total[mine], f"gradient of {name}")


CASES = {
    "uneven": {},
    "replicas": {"parallel": 2},
    "nobody on rank 1": {"tokens": NOBODY_ON_RANK_1},
    "rank 1 has padding only": {"padding_rank": 1},
    "all on one expert": {"one_expert": True, "options": {"top_k": 1}},
    "drops": {"options": {"capacity_factor": 0.5}, "tokens": (9, 4, 17, 8)},
    "glu without bias": {"options": {"expert_type": "glu", "expert_bias": False}},
    "bf16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("exchange", ["ragged", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_experts_on_several_ranks_equal_experts_on_one_rank(ranks, name, exchange):
    case = dict(CASES[name])
    options = {"exchange": exchange, **case.pop("options", {})}
    ranks(4).run(compare_with_one_rank, Case(options=tuple(options.items()), **case))


def agree(needs) -> int:
    need = torch.tensor(needs[dist.get_rank()])
    call_id = CallId(CallCounter(dist.group.WORLD, "a test", 1))
    return agreed_capacity(need, ExchangeOptions(group=dist.group.WORLD), call_id)


def test_the_agreed_capacity_is_the_largest_row_count_of_all_ranks_but_at_least_1(ranks):
    assert ranks(4).run(agree, [[1, 5], [3, 0], [0, 0], [0, 0]]) == [5] * 4
    assert ranks(4).run(agree, [[0, 0]] * 4) == [1] * 4


def test_regroup_maps_equal_a_brute_force_sort_for_all_small_row_counts():
    for flat in (*itertools.product(range(3), repeat=4), (2, 0, 3, 1, 4, 0)):
        counts_PE = torch.tensor(flat).view(2, -1)
        # A row is (source rank, expert, number among the rows of this rank and expert).
        sizes = [(p, e, n) for p, row in enumerate(counts_PE.tolist()) for e, n in enumerate(row)]
        by_source = [(p, e, i) for p, e, n in sizes for i in range(n)]
        by_expert = sorted(by_source, key=lambda row: (row[1], row[0], row[2]))
        to_expert, to_source = regroup_maps(counts_PE, len(by_source))
        assert [by_source[i] for i in to_expert.tolist()] == by_expert
        assert [by_expert[i] for i in to_source.tolist()] == by_source
