"""Ensemble members share features: each pauses after a layer until the outputs of all members are mixed."""

from functools import partial

import pytest
import torch
from torch import nn

from fairseq_tutel.models.feature_sharing import run_and_share, shared

M = 3


class Member(nn.Module):
    """An ensemble member with two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x, times=1):
        for _ in range(times):
            h = self.first(x)
        return self.second(h if times else torch.zeros(len(x), 6).to(x))


@pytest.fixture
def members():
    torch.manual_seed(0)
    return nn.ModuleList(Member() for _ in range(M)).double()


def run(members, x, share, **more):
    forwards = [partial(member, x, **more) for member in members]
    return torch.stack(run_and_share(forwards, [member.first for member in members], share))


def test_features_shared_in_evaluation_are_the_mean_of_those_in_training():
    features = list(torch.rand(M, 5).double() + 1)
    mixed = shared(features, 0.7, training=False)
    for m in range(M):
        others = sum(h for i, h in enumerate(features) if i != m)
        torch.testing.assert_close(mixed[m], features[m] + 0.7 * others)
    torch.manual_seed(1)
    drawn = torch.stack([torch.stack(shared(features, 0.7, training=True)) for _ in range(4000)])
    torch.testing.assert_close(drawn.mean(dim=0), torch.stack(mixed), rtol=0.02, atol=0)
    # Random masks differ between elements, and never remove features that the member itself computed.
    assert len(drawn[:, 0, 0].unique()) == 4 and (drawn[:, 0] >= features[0]).all()


def test_outputs_and_gradients_of_feature_sharing_equal_a_direct_computation(members):
    x = torch.randn(5, 4).double()
    share = partial(shared, keep=0.7, training=False)
    outputs = run(members, x, share)
    features = [member.first(x) for member in members]
    by_hand = torch.stack([member.second(h) for member, h in zip(members, share(features), strict=True)])
    torch.testing.assert_close(outputs, by_hand)
    weights = torch.randn_like(outputs)
    grads = [
        torch.autograd.grad((y * weights).sum(), list(members.parameters())) for y in (outputs, by_hand)
    ]
    torch.testing.assert_close(*grads)


def test_ensemble_members_run_one_at_a_time_in_order(members):
    """Ensemble members draw reproducible random numbers, and no forward hook remains on a member."""
    drawn = []
    for member in members:
        member.first.register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(()))))
    x = torch.randn(5, 4).double()
    for _ in range(2):
        torch.manual_seed(0)
        run(members, x, list)
    assert drawn[:M] == drawn[M:]
    assert all(not member.first._forward_hooks for member in members)


def test_threads_of_members_use_the_caller_s_autocast_and_no_grad(members):
    x = torch.randn(5, 4)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = run(members.float(), x, list)
    assert outputs.dtype == torch.bfloat16 and not outputs.requires_grad


class Broken(Member):
    def forward(self, x, **_):
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    "kind, said",
    (
        ("never", "does not call"),
        ("twice", "calls twice"),
        ("broken", "^broken$"),
    ),
)
def test_a_member_that_does_not_call_the_shared_layer_exactly_once_raises_an_error(members, kind, said):
    x, more = torch.randn(5, 4).double(), {}
    if kind == "broken":
        members[1] = Broken().double()
    if kind in ("never", "twice"):
        more["times"] = 0 if kind == "never" else 2
    with pytest.raises(RuntimeError if kind == "broken" else ValueError, match=said):
        run(members, x, list, **more)
