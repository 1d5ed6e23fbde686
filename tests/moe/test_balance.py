"""The tests compare balance losses with direct computations, and gradients with finite differences."""

import math
import statistics

import pytest
import torch
from normal import normal as logits
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer, gshard_loss, route
from fairseq_tutel.moe.balance import (
    LOSSES,
    gshard_all_loss,
    gshard_sequence_loss,
    load_importance_loss,
    load_importance_tutel_loss,
    z_loss,
)
from fairseq_tutel.moe.routing import GateOutput


def gate(logits_TE: Tensor) -> GateOutput:
    return GateOutput(logits_TE=logits_TE, clean_TE=logits_TE)


def test_gshard_loss_equals_a_hand_computed_value():
    probs_TE = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2]])
    # The experts' load shares are (3/4, 1/4, 0), and the mean probabilities are (1.9, 1.4, 0.7) / 4.
    expected = 3 * (0.75 * 1.9 / 4 + 0.25 * 1.4 / 4)
    assert float(gshard_loss(route(probs_TE.log(), 2))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("top_k", (1, 2, 5))
def test_the_gshard_all_loss_counts_all_k_choices_of_a_token(top_k):
    logits_TE, real = logits(9, 5), [t % 4 != 2 for t in range(9)]
    routing = route(logits_TE, top_k, real_T=torch.tensor(real))
    probs, ids = torch.softmax(logits_TE, 1).tolist(), routing.expert_ids_TK.tolist()
    tokens = [t for t in range(9) if real[t]]
    expected = 0.0
    for e in range(5):
        share = sum(ids[t].count(e) for t in tokens) / (top_k * len(tokens))
        expected += 5 * share * sum(probs[t][e] for t in tokens) / len(tokens)
    assert float(gshard_all_loss(routing)) == pytest.approx(expected)
    if top_k == 5:  # All tokens choose all experts.
        assert float(gshard_all_loss(routing)) == pytest.approx(1.0)


def test_the_z_loss_equals_the_mean_squared_logsumexp_of_the_logits():
    logits_TE, real = logits(7, 3) * 4, [t != 2 for t in range(7)]
    routing = route(logits_TE, 1, real_T=torch.tensor(real))
    tokens = [row.tolist() for row, r in zip(logits_TE, real, strict=True) if r]
    expected = sum(math.log(sum(math.exp(z) for z in row)) ** 2 for row in tokens) / 6
    assert float(z_loss(routing, gate(logits_TE))) == pytest.approx(expected)
    all_padding = route(logits_TE, 1, real_T=torch.zeros(7, dtype=torch.bool))
    assert float(z_loss(all_padding, gate(logits_TE))) == 0.0


def gshard_all_by_loops(probs, assignments) -> float:
    """Return E * sum(load share * mean probability); `assignments` lists the experts of each token."""
    num_experts, requested = len(probs[0]), [e for ids in assignments for e in ids]
    return sum(
        num_experts
        * requested.count(e)
        / max(len(requested), 1)
        * sum(row[e] for row in probs)
        / len(probs)
        for e in range(num_experts)
    )


def copies_of(routing) -> list[list[int]]:
    pairs = zip(routing.expert_ids_TK.tolist(), routing.slots_TK.tolist(), strict=True)
    return [[e for e, s in zip(ids, slots, strict=True) if s >= 0] for ids, slots in pairs]


SEQUENCE_RULES = (
    {},
    {"score_function": "sigmoid"},
    {"choice": "experts"},
    {"second_expert_policy": "random", "training": True},
)


@pytest.mark.parametrize("time_first", (False, True))
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("rules", SEQUENCE_RULES, ids=str)
def test_the_gshard_sequence_loss_is_the_mean_of_the_losses_of_sentences(time_first, padded, rules):
    count, time = 4, 5
    logits_TE = logits(count * time, 3)
    lengths = [5, 3, 0, 4] if padded else [5] * 4
    # `places` has each token's sentence and time step. One sentence may have only padding.
    places = [(t % count, t // count) if time_first else divmod(t, time) for t in range(20)]
    real_T = torch.tensor([at < lengths[s] for s, at in places])
    torch.manual_seed(1)
    routing = route(logits_TE, 2, real_T=real_T if padded else None, **rules)
    output = GateOutput(
        logits_TE=logits_TE, clean_TE=logits_TE, sentences=(count, time), time_first=time_first
    )
    probs, assignments = routing.probs_TE.tolist(), copies_of(routing)
    values = []
    for s in range(count):
        mine = [t for t in range(20) if places[t][0] == s and real_T[t]]
        if mine:
            values.append(gshard_all_by_loops([probs[t] for t in mine], [assignments[t] for t in mine]))
    assert len(values) == (3 if padded else 4)
    assert float(gshard_sequence_loss(routing, output)) == pytest.approx(statistics.mean(values))


@pytest.mark.parametrize("name", ("gshard", "gshard_all", "gshard_sequence", "gshard_global"))
def test_balance_losses_divide_sigmoid_scores_by_their_sum_per_token(name):
    logits_TE = logits(8, 4)
    routing = route(logits_TE, 2, score_function="sigmoid")
    scores = [[1 / (1 + math.exp(-z)) for z in row] for row in logits_TE.tolist()]
    probs = [[s / sum(row) for s in row] for row in scores]
    assignments = [ids[:1] if name == "gshard" else ids for ids in routing.expert_ids_TK.tolist()]
    expected = gshard_all_by_loops(probs, assignments)
    assert float(LOSSES[name](routing, gate(logits_TE))) == pytest.approx(expected)


def cv_squared(values: list[float]) -> float:
    if len(values) == 1:
        return 0.0
    return statistics.variance(values) / (statistics.mean(values) ** 2 + 1e-10)


def normal_cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def noisy_gate(clean_TE: Tensor, noise: float = 0.4, **options) -> GateOutput:
    shift_TE = noise * logits(*clean_TE.shape, seed=9).to(clean_TE.dtype)
    return GateOutput(logits_TE=clean_TE + shift_TE, clean_TE=clean_TE, noise=noise, **options)


@pytest.mark.parametrize("num_experts, top_k", [(5, 1), (5, 2), (5, 4), (5, 5), (1, 1)])
@pytest.mark.parametrize("function", ("softmax", "sigmoid"))
@pytest.mark.parametrize("padded", (False, True))
def test_the_load_importance_loss_equals_a_computation_by_loops(num_experts, top_k, function, padded):
    output = noisy_gate(logits(8, num_experts), score_function=function)
    real_T = torch.arange(8) % 3 != 1 if padded else None
    routing = route(output.logits_TE, top_k, real_T=real_T, score_function=function)
    importance, load = [0.0] * num_experts, [0.0] * num_experts
    for t in range(8):
        if padded and not real_T[t]:
            continue
        clean, noisy = output.clean_TE[t].tolist(), output.logits_TE[t].tolist()
        scores = [math.exp(z) if function == "softmax" else 1 / (1 + math.exp(-z)) for z in clean]
        for e in range(num_experts):
            importance[e] += scores[e] / sum(scores)
            others = sorted(noisy[:e] + noisy[e + 1 :], reverse=True)
            if top_k == num_experts:  # Every token chooses all experts.
                load[e] += 1.0
            else:
                load[e] += normal_cdf((clean[e] - others[top_k - 1]) / 0.4)
    expected = (cv_squared(importance) + cv_squared(load)) / 2
    assert float(load_importance_loss(routing, output)) == pytest.approx(expected)
    assert (expected > 0) == (num_experts > 1)


@pytest.mark.parametrize("num_experts, top_k", [(5, 1), (5, 2), (5, 5), (1, 1)])
def test_tutels_load_importance_loss_equals_its_formula(num_experts, top_k):
    output, real = noisy_gate(logits(8, num_experts)), [t % 3 != 1 for t in range(8)]
    routing = route(output.logits_TE, top_k, real_T=torch.tensor(real))
    importance, load = [0.0] * num_experts, [0.0] * num_experts
    for t in range(8):
        if real[t]:
            clean = [math.exp(z) for z in output.clean_TE[t].tolist()]
            threshold = sorted(output.logits_TE[t].tolist(), reverse=True)[top_k - 1]
            for e in range(num_experts):
                prob = clean[e] / sum(clean)
                importance[e] += prob
                load[e] += normal_cdf((prob - threshold) / 0.4)
    expected = (cv_squared(importance) + cv_squared(load)) / 2
    assert float(load_importance_tutel_loss(routing, output)) == pytest.approx(expected)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("function", ("softmax", "sigmoid"))
@pytest.mark.parametrize("top_k", (1, 2, 4))
def test_gradients_of_all_balance_losses_equal_finite_differences(name, function, top_k):
    real_T = torch.tensor([True, True, False, True, True, True])

    def loss(x: Tensor) -> Tensor:
        output = noisy_gate(x, score_function=function, sentences=(2, 3))
        routing = route(output.logits_TE, top_k, real_T=real_T, score_function=function)
        return LOSSES[name](routing, output)

    assert torch.autograd.gradcheck(loss, (logits(6, 4).requires_grad_(),))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("num_tokens", (0, 6))
@pytest.mark.parametrize("choice", ("tokens", "experts"))
def test_without_real_tokens_every_balance_loss_and_its_gradient_are_zero(name, num_tokens, choice):
    logits_TE = logits(num_tokens, 4).requires_grad_()
    output = noisy_gate(logits_TE, sentences=(2, num_tokens // 2))
    real_T = torch.zeros(num_tokens, dtype=torch.bool)
    loss = LOSSES[name](route(output.logits_TE, 2, real_T=real_T, choice=choice), output)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits_TE.grad, torch.zeros_like(logits_TE))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("name", LOSSES)
def test_every_balance_loss_of_a_half_precision_gate_is_fp32(name, dtype):
    def loss(wide: bool) -> Tensor:
        output = noisy_gate(logits(3000, 4).to(dtype).to(torch.float64 if wide else dtype), noise=1.0)
        return LOSSES[name](route(output.logits_TE, 2), output)

    assert loss(False).dtype == torch.float32
    assert float(loss(False)) == pytest.approx(float(loss(True)), rel=2e-2)


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("time_first", (True, False))
def test_the_layer_passes_noise_and_sentences_and_scores_to_every_balance_loss(training, time_first):
    names = ("gshard_sequence", "gshard_global", "load_importance", "load_importance_tutel", "z")
    config = MoEConfig(
        model_dim=6, hidden_dim=3, num_experts=4, gate_noise=2.0, score_function="sigmoid",
        balance_loss=",".join(names),
    )  # fmt: skip
    layer = MoELayer(config, seed=1).double().train(training)
    x = logits(3 * 5, 6).view(3, 5, 6)
    mask = torch.arange(x.shape[1]) >= torch.tensor([[5], [2], [4]])
    if time_first:
        x = x.transpose(0, 1)
    torch.manual_seed(2)
    losses = layer(x, mask, time_first=time_first)[1].losses
    flat, mask_T = x.reshape(-1, 6), (mask.t() if time_first else mask).reshape(-1)
    clean_TE = layer.gate(flat)
    torch.manual_seed(2)
    noisy_TE = clean_TE + torch.randn_like(clean_TE) * (2.0 / 4) if training else clean_TE
    output = GateOutput(
        logits_TE=noisy_TE, clean_TE=clean_TE, noise=0.5, score_function="sigmoid", sentences=(3, 5),
        time_first=time_first,
    )  # fmt: skip
    routing = route(noisy_TE, 2, real_T=~mask_T, score_function="sigmoid")
    assert list(losses) == list(names)
    for name, loss in losses.items():
        torch.testing.assert_close(loss, LOSSES[name](routing, output), msg=name)
