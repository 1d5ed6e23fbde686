"""Balance losses.

Covered: gshard by hand, over all choices, z by loops, gradients by finite differences; at uniform load,
at collapse, over real tokens only, before dropping, without tokens, dtypes.
"""

import math

import pytest
import torch
from torch import Tensor

from fairseq_tutel import gshard_loss, route
from fairseq_tutel.losses import GateOutput, balance_losses, gshard_all_loss, z_loss


def logits(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)


def gate(logits_TE: Tensor) -> GateOutput:
    return GateOutput(logits_TE=logits_TE, clean_TE=logits_TE)


def test_gshard_by_hand():
    probs_TE = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.1, 0.8, 0.1], [0.5, 0.3, 0.2]])
    # First choices 0, 0, 1, 0: f = (3/4, 1/4, 0); P = (1.9, 1.4, 0.7) / 4.
    expected = 3 * (0.75 * 1.9 / 4 + 0.25 * 1.4 / 4)
    assert float(gshard_loss(route(probs_TE.log(), 2))) == pytest.approx(expected, rel=1e-6)


def test_gshard_is_1_at_uniform_load_and_uniform_probabilities():
    # Nearly uniform probabilities, each expert the first choice of two tokens.
    logits_TE = 1e-9 * torch.eye(4, dtype=torch.float64).repeat(2, 1)
    assert float(gshard_loss(route(logits_TE, 1))) == pytest.approx(1.0, rel=1e-8)


def test_gshard_is_the_number_of_experts_at_collapse():
    logits_TE = torch.zeros(9, 5, dtype=torch.float64)
    logits_TE[:, 3] = 100.0
    assert float(gshard_loss(route(logits_TE, 2))) == pytest.approx(5.0)


def test_gshard_looks_at_choices_before_dropping():
    logits_TE = logits(20, 4)
    assert torch.equal(gshard_loss(route(logits_TE, 2)), gshard_loss(route(logits_TE, 2, 0.25)))


def test_gshard_of_real_tokens_ignores_padding():
    logits_TE, real_T = logits(12, 4), torch.arange(12) % 4 != 2
    padded = gshard_loss(route(logits_TE, 2, real_T=real_T))
    torch.testing.assert_close(padded, gshard_loss(route(logits_TE[real_T], 2)))


def test_gshard_has_the_gradient_of_finite_differences():
    real_T = torch.tensor([True, True, False, True, True])
    inputs = (logits(5, 3).requires_grad_(),)
    assert torch.autograd.gradcheck(lambda x: gshard_loss(route(x, 2, real_T=real_T)), inputs)


@pytest.mark.parametrize("num_tokens", (0, 3))
def test_gshard_without_real_tokens_is_0_with_gradient_0(num_tokens):
    logits_TE = logits(num_tokens, 4).requires_grad_()
    loss = gshard_loss(route(logits_TE, 2, real_T=torch.zeros(num_tokens, dtype=torch.bool)))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits_TE.grad, torch.zeros_like(logits_TE))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_gshard_of_a_half_precision_gate_stays_within_its_rounding(dtype):
    # More tokens than fp16's largest number, and than bf16 can count one by one.
    logits_TE = logits(70_000, 4).to(dtype)
    loss = gshard_loss(route(logits_TE, 1))
    assert float(loss) == pytest.approx(float(gshard_loss(route(logits_TE.double(), 1))), rel=5e-3)


def test_losses_come_by_name():
    routing = route(logits(6, 3), 1)
    assert balance_losses({}, routing, gate(logits(6, 3))) == {}
    named = balance_losses({"gshard": 0.5, "switch": 2.0}, routing, gate(logits(6, 3)))
    assert list(named) == ["gshard", "switch"]
    assert torch.equal(named["gshard"], gshard_loss(routing))  # unweighted
    assert torch.equal(named["switch"], named["gshard"])  # one formula


@pytest.mark.parametrize("top_k", (1, 2, 5))
def test_gshard_over_all_choices_counts_every_choice(top_k):
    logits_TE, real = logits(9, 5), [t % 4 != 2 for t in range(9)]
    routing = route(logits_TE, top_k, real_T=torch.tensor(real))
    probs, ids = torch.softmax(logits_TE, 1).tolist(), routing.expert_ids_TK.tolist()
    tokens = [t for t in range(9) if real[t]]
    expected = 0.0
    for e in range(5):
        share = sum(ids[t].count(e) for t in tokens) / (top_k * len(tokens))
        expected += 5 * share * sum(probs[t][e] for t in tokens) / len(tokens)
    assert float(gshard_all_loss(routing)) == pytest.approx(expected)
    if top_k == 5:  # every expert is chosen by all
        assert float(gshard_all_loss(routing)) == pytest.approx(1.0)


def test_z_is_the_mean_squared_log_of_the_partition_function():
    logits_TE, real = logits(7, 3) * 4, [t != 2 for t in range(7)]
    routing = route(logits_TE, 1, real_T=torch.tensor(real))
    tokens = [row.tolist() for row, r in zip(logits_TE, real, strict=True) if r]
    expected = sum(math.log(sum(math.exp(z) for z in row)) ** 2 for row in tokens) / 6
    assert float(z_loss(routing, gate(logits_TE))) == pytest.approx(expected)
    nobody = route(logits_TE, 1, real_T=torch.zeros(7, dtype=torch.bool))
    assert float(z_loss(nobody, gate(logits_TE))) == 0.0


def test_the_losses_gradients_are_finite_differences():
    inputs = (logits(5, 4).requires_grad_(),)
    real_T = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda x: z_loss(route(x, 2, real_T=real_T), gate(x)), inputs)
    assert torch.autograd.gradcheck(lambda x: gshard_all_loss(route(x, 2, real_T=real_T)), inputs)
