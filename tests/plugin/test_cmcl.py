"""The confident loss equals a brute-force minimum; its gradients equal finite differences."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fairseq_tutel.plugin.criterions.confident_loss import (
    confident_loss,
    mean_log_probs,
    random_labels,
)

N, C = 7, 5
SIZES = [(M, K) for M in (1, 2, 3, 4) for K in range(1, M + 1)]


def case(M: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(M, N, C, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(C, (N,), generator=generator)


def by_loop(logits_MNC, target_N, beta) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each member's cross entropy, and beta times its divergence, by torch's functions."""
    ce, kl = [], []
    for logits_NC in logits_MNC:
        logs_NC = logits_NC.log_softmax(dim=1)
        uniform_NC = torch.full_like(logs_NC, 1 / C)
        ce.append(F.cross_entropy(logits_NC, target_N, reduction="none"))
        kl.append(beta * F.kl_div(logs_NC, uniform_NC, reduction="none").sum(dim=1))
    return torch.stack(ce), torch.stack(kl)


@pytest.mark.parametrize("beta", (0.0, 0.75, 3.0))
@pytest.mark.parametrize("M, K", SIZES)
def test_no_assignment_has_a_smaller_loss(M, K, beta):
    logits, target = case(M)
    ce_MN, kl_MN = by_loop(logits, target, beta)
    expected = sum(
        min(
            sum(ce_MN[m, n] if m in learns else kl_MN[m, n] for m in range(M))
            for learns in itertools.combinations(range(M), K)
        )
        for n in range(N)
    )
    loss, chosen_MN = confident_loss(logits, target, K, beta)
    torch.testing.assert_close(loss, expected)
    assert (chosen_MN.sum(dim=0) == K).all()
    own = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(own, torch.autograd.grad(expected, logits)[0])


def test_the_mean_loss_over_all_labels_is_the_divergence_plus_a_constant():
    logits, target = case(3)
    K, beta = 1, 0.75
    of_labels = [
        confident_loss(logits, target, K, beta, torch.full((3, N), label))[0] for label in range(C)
    ]
    exact, _ = confident_loss(logits, target, K, beta)
    mean = torch.stack(of_labels).mean()
    constant = beta * (3 - K) * N * math.log(C)
    torch.testing.assert_close(mean, exact + constant, rtol=1e-14, atol=0)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (mean, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("labels", (None, "drawn"))
@pytest.mark.parametrize("left_out", (False, True))
def test_gradients_equal_finite_differences(labels, left_out):
    logits, target = case(3, seed=1)
    labels = None if labels is None else random_labels(logits)
    counts = torch.arange(N) % 3 > 0 if left_out else None
    torch.autograd.gradcheck(lambda z: confident_loss(z, target, 2, 0.75, labels, counts)[0], (logits,))
    torch.autograd.gradcheck(mean_log_probs, (logits,))


def test_ignored_samples_do_not_affect_the_loss():
    logits, target = case(3)
    counts = torch.arange(N) < 4
    target = target.masked_fill(~counts, -100)
    loss, _ = confident_loss(logits, target, 1, 0.75, None, counts)
    torch.testing.assert_close(loss, confident_loss(logits[:, :4], target[:4], 1, 0.75)[0])
    loss.backward()
    assert not logits.grad[:, 4:].any() and logits.grad[:, :4].all()


def test_half_precision_is_computed_in_fp32():
    logits, target = case(3)
    half = logits.detach().bfloat16().requires_grad_()
    loss, _ = confident_loss(half, target, 2, 0.75)
    same, _ = confident_loss(half.float(), target, 2, 0.75)
    assert loss.dtype == mean_log_probs(half).dtype == torch.float32
    assert loss == same
    loss.backward()
    assert half.grad.dtype == torch.bfloat16


def test_mean_log_probs_averages_probabilities_also_if_a_class_has_probability_0():
    logits, _ = case(3)
    expected = logits.softmax(dim=-1).mean(dim=0).log()
    torch.testing.assert_close(mean_log_probs(logits), expected)
    excluded = logits.detach().clone()
    excluded[..., 2] = -torch.inf
    excluded.requires_grad_()
    mean_log_probs(excluded)[..., [0, 1, 3, 4]].sum().backward()
    assert excluded.grad.isfinite().all()
