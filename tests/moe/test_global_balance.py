"""Balance losses and bias over all ranks, compared with a direct computation from all ranks' tokens."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from normal import normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.moe.balance import update_biases
from fairseq_tutel.parallel.groups import topology_within

CONFIG = MoEConfig(model_dim=6, hidden_dim=5, num_experts=4, balance_loss="gshard_global:1")


def tokens(count: int, rank: int) -> Tensor:
    return normal(count, CONFIG.model_dim, seed=100 + rank).requires_grad_()


def direct_loss(layer: MoELayer, counts: tuple[int, ...], padding_rank: int | None) -> list[Tensor]:
    """Return every rank's loss, computed by loops over the assignments of all ranks' tokens."""
    load, probs = [0] * 4, []
    for rank, count in enumerate(counts):
        probs_TE = torch.softmax(tokens(count, rank) @ layer.gate.weight.t(), 1)
        probs.append(probs_TE[:0] if rank == padding_rank else probs_TE)
        for row in probs[-1].tolist():
            for e in sorted(range(4), key=row.__getitem__, reverse=True)[: layer.config.top_k]:
                load[e] += 1
    share_E = torch.tensor(load, dtype=torch.float64) / max(sum(load), 1)
    return [4 * (share_E * p.sum(dim=0)).sum() / max(len(p), 1) for p in probs]


def compare(counts: tuple[int, ...], padding_rank: int | None, top_k: int, recompute: bool) -> None:
    rank = dist.get_rank()
    config = dataclasses.replace(CONFIG, top_k=top_k, capacity_factor=0.5)
    layer = MoELayer(config, make_topology([4]), seed=1).double()
    x = tokens(counts[rank], rank)
    mask = torch.full((len(x),), rank == padding_rank)

    def forward(x: Tensor) -> Tensor:
        return layer(x, mask)[1].balance_loss

    loss = checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
    (got,) = torch.autograd.grad(loss, layer.gate.weight)
    expected = direct_loss(layer, counts, padding_rank)[rank]
    (grad,) = torch.autograd.grad(expected, layer.gate.weight)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, grad)


@pytest.mark.parametrize("top_k", (1, 2))
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("counts, padding_rank", [((9, 4), None), ((9, 4), 1), ((0, 5), None)])
def test_the_global_loss_equals_a_direct_computation(ranks, counts, padding_rank, top_k, recompute):
    ranks(2).run(compare, counts, padding_rank, top_k, recompute)


def evaluate_on_rank_0_alone() -> None:
    # Each rank has all experts, so only the loss needs the other ranks.
    layer = MoELayer(CONFIG, make_topology([4], 1), seed=1).double().eval()
    if dist.get_rank() == 0:
        loss = layer(tokens(7, 0))[1].balance_loss
        torch.testing.assert_close(loss, direct_loss(layer, (7,), None)[0])


def test_evaluation_needs_no_other_rank(ranks):
    ranks(2).run(evaluate_on_rank_0_alone)


def biases_after_two_updates() -> tuple[list[float], list[list[int]]]:
    config = dataclasses.replace(CONFIG, balance_bias=True, bias_update_rate=0.25, top_k=1)
    place = make_topology([4])
    model = torch.nn.ModuleList([MoELayer(config, place, seed=i).double() for i in (1, 2)])
    loads = []
    for _ in range(2):
        for layer in model:
            layer(tokens((9, 4)[dist.get_rank()], dist.get_rank()))
        loads.append([layer.balance_bias.load.tolist() for layer in model])
        update_biases(model)
        assert not any(layer.balance_bias.load.any() for layer in model)
    return [layer.balance_bias.bias.tolist() for layer in model], loads


def test_the_bias_depends_on_the_load_of_all_ranks(ranks):
    (biases, loads), (other_biases, other_loads) = ranks(2).run(biases_after_two_updates)
    assert biases == other_biases
    assert loads != other_loads
    for layer in range(2):
        expected = [0.0] * 4
        for mine, theirs in zip(loads, other_loads, strict=True):
            total = [a + b for a, b in zip(mine[layer], theirs[layer], strict=True)]
            mean = sum(total) / 4
            for e, load in enumerate(total):
                expected[e] += 0.25 * ((load < mean) - (load > mean))
        assert biases[layer] == expected


def loss_and_bias(within_pair: bool) -> tuple[float, list[float]]:
    """Return the loss and the bias of this rank; the topology has all ranks or pairs of them."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])] if within_pair else []
    place = topology_within(pairs[rank // 2], 4) if within_pair else make_topology([4])
    config = dataclasses.replace(CONFIG, balance_bias=True, bias_update_rate=0.25, top_k=1)
    layer = MoELayer(config, place, seed=1).double()
    loss = float(layer(tokens((9, 4)[rank % 2], rank))[1].balance_loss)
    update_biases(layer)
    return loss, layer.balance_bias.bias.tolist()


def test_a_layer_on_some_ranks_sums_only_the_loads_of_these_ranks(ranks):
    found = ranks(4).run(loss_and_bias, True)
    expected = ranks(2).run(loss_and_bias, False)
    assert found[:2] == expected
    assert found[2:] != expected
