"""Gating dropout (--moe-local-drop) replaces the experts of other ranks by the experts of this rank."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from compare import close
from normal import normal
from torch.utils.checkpoint import checkpoint

from fairseq_tutel import MoEConfig, MoELayer, make_topology
from fairseq_tutel.moe.call import Call
from fairseq_tutel.plugin.feed_forward import Context, MoEFeedForward

E, L = 6, 3  # E is the number of all experts, and L is the number of experts per rank.
OPTIONS = (
    {},
    {"capacity_factor": 0.5, "exchange": "padded"},
    {"prescore": True, "top_k": 3, "a2a_ffn_overlap_degree": 3},
    {"adaptive_r": 0, "expert_type": "glu"},
    {"choice": "experts", "cmr": True, "eom": 0.3},
)


def config(**options) -> MoEConfig:
    return MoEConfig(model_dim=5, hidden_dim=4, num_experts=E, **options)


def run(layer, x, local):
    """Return the layer's output and the gradients of its input and of all parameters."""
    torch.manual_seed(2)
    x_TD = x.clone().requires_grad_()
    mask = torch.arange(len(x)) % 5 == 3
    call = Call.of(x_TD, 5, mask)
    tokens_TD = call.tokens(x_TD)
    y = layer.apply_routing(tokens_TD, layer.route(tokens_TD, call), local)
    y.square().sum().backward()
    return y, x_TD.grad, {name: p.grad for name, p in layer.named_parameters()}


def on_a_rank(options, count):
    rank = dist.get_rank()
    own = slice(rank * L, (rank + 1) * L)
    layer = MoELayer(config(**options), make_topology([E], 2), seed=1).double()
    one = MoELayer(config(**options), seed=1).double()  # This rank has all experts.
    for parameter in one.experts.parameters():
        parameter.data.copy_(parameter.data[own].repeat(2, *[1] * (parameter.dim() - 1)))
    x = normal(count + rank, 5, seed=rank)
    y, dx, grads = run(layer, x, local=True)
    expected, expected_dx, expected_grads = run(one, x, local=False)
    close(y, expected, "y")
    close(dx, expected_dx, "gradient of x")
    for name, grad in grads.items():
        whole = expected_grads[name]
        close(grad, whole[:L] + whole[L:] if name.startswith("experts.") else whole, name)
    assert count == 0 or not torch.allclose(run(layer, x, local=False)[0], y)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gating_dropout_computes_all_rows_of_a_rank_with_its_local_experts(ranks, options):
    ranks(2).run(on_a_rank, options, 13)


def test_gating_dropout_works_on_a_rank_without_tokens(ranks):
    ranks(2).run(on_a_rank, {}, 0)


def recomputed():
    context = Context(True, local_drop=0.5, seed=3)
    build = partial(MoEFeedForward, config(eom=0.3, fom=0.2), make_topology([E], 2), 1, "first", context)
    layer, again = build().double(), build().double()
    decisions = []
    for update in range(8):
        context.begin_step(update=update)
        decisions.append(context.keeps_rows(layer))
        grads = []
        for each, recomputes in ((layer, False), (again, True)):
            each.begin_micro_batch()
            x = normal(4, 2, 5, seed=dist.get_rank()).requires_grad_()
            torch.manual_seed(update)
            y = checkpoint(each, x, use_reentrant=False) if recomputes else each(x)
            y.square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
    return decisions, layer.calls.count


def test_all_ranks_and_recomputed_passes_make_the_same_gating_dropout_decision(ranks):
    (one, count), other = ranks(2).run(recomputed)
    assert (one, count) == other
    assert set(one) == {False, True} and count == one.count(False)


def test_gating_dropout_has_the_configured_probability_and_differs_by_layer_and_seed_and_update():
    class Layer:
        training, calls = True, object()

        def __init__(self, name):
            self.name = name

    found = {}
    for seed in (1, 2):
        context = Context(True, local_drop=0.3, seed=seed)
        for name in ("decoder.layers.0.fc1", "decoder.layers.1.fc1"):
            row = []
            for update in range(400):
                context.begin_step(update=update)
                row.append(context.keeps_rows(Layer(name)))
            found[seed, name] = tuple(row)
            assert Counter(row)[True] == pytest.approx(120, abs=40)
    assert len(set(found.values())) == 4
    context.begin_step()
    layer = Layer("decoder.layers.0.fc1")
    layer.training = False
    assert not any(context.keeps_rows(layer) for _ in range(20))
