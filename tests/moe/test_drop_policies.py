"""The tests compare drop policies with brute force, and check the invariants of routing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from normal import normal

from fairseq_tutel import route
from fairseq_tutel.moe.slots import DROP_POLICIES

E = 4


def logits(num_tokens, seed=0, num_experts=E):
    return normal(num_tokens, num_experts, seed=seed)


def limit(factor, top_k, num_real, num_experts=E):
    return top_k * math.ceil(abs(factor) * num_real / num_experts) if factor else math.inf


def brute_force(policy, probs, ids, real):
    """Sort tuples to find the order in which each expert's assignments (token, choice) get slots."""
    assignments = [(t, j) for t in range(len(ids)) for j in range(len(ids[0])) if real[t]]
    keys = {
        "position": lambda t, j: (j, t),
        "bpr": lambda t, j: (j, -max(probs[t]), t),
        "probability": lambda t, j: (-probs[t][ids[t][j]], j, t),
    }
    assignments.sort(key=lambda copy: keys[policy](*copy))
    return [[(t, j) for t, j in assignments if ids[t][j] == e] for e in range(len(probs[0]))]


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(list(DROP_POLICIES)),
    num_tokens=st.integers(0, 24),
    num_experts=st.integers(1, 6),
    k=st.integers(1, 6),
    factor=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.25, -0.5]),
    pads=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_every_drop_policy_keeps_the_invariants_of_routing(
    policy, num_tokens, num_experts, k, factor, pads, seed
):
    top_k = min(k, num_experts)
    real_T = torch.arange(num_tokens) % 5 >= pads
    num_real = int(real_T.sum())
    torch.manual_seed(seed)
    r = route(
        logits(num_tokens, seed, num_experts), top_k, factor, drop_policy=policy, training=True,
        real_T=real_T,
    )  # fmt: skip
    most = limit(factor, top_k, num_real, num_experts)
    kept_TK = r.row_of_TK >= 0
    assert int(kept_TK.sum()) + int(r.dropped_K.sum()) == num_real * top_k
    assert kept_TK.sum(0).tolist() == (num_real - r.dropped_K).tolist()
    assert not kept_TK[~real_T].any()
    totals = torch.zeros(num_experts, dtype=torch.int64)
    for e in range(num_experts):
        mine_TK = (r.expert_ids_TK == e) & real_T.unsqueeze(1)
        totals[e] = mine_TK.sum()
        assert sorted(r.slots_TK[mine_TK].tolist()) == list(range(int(totals[e])))
        assert torch.equal(kept_TK[mine_TK], r.slots_TK[mine_TK] < most)
    assert r.counts_E.tolist() == [min(int(n), most) for n in totals]
    assert torch.equal(r.assigned_KE.sum(0), totals)
    rows = r.row_of_TK[kept_TK]
    assert len(set(rows.tolist())) == len(rows)


@pytest.mark.parametrize("policy", [p for p in DROP_POLICIES if p != "rts"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.5, 1.0, -0.7])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bias", [None, (2.0, 0.0, 0.0, -2.0)], ids=("plain", "biased"))
def test_the_slots_of_every_drop_policy_equal_brute_force(policy, top_k, factor, padded, bias):
    logits_TE = logits(19, seed=top_k)
    logits_TE[7] = logits_TE[3]  # If two tokens have equal logits, the earlier token gets a slot first.
    real = [t % 4 != 1 or not padded for t in range(19)]
    # With a balance bias, a token's first choice is not its most probable expert.
    bias_E = None if bias is None else torch.tensor(bias)
    rules = {"drop_policy": policy, "real_T": torch.tensor(real), "bias_E": bias_E}
    r = route(logits_TE, top_k, factor, **rules)
    probs = torch.softmax(logits_TE, 1).tolist()
    for assignments in brute_force(policy, probs, r.expert_ids_TK.tolist(), real):
        assert [int(r.slots_TK[t, j]) for t, j in assignments] == list(range(len(assignments)))
    assert int(r.dropped_K.sum()) > 0


@pytest.mark.parametrize("policy", DROP_POLICIES)
def test_time_first_and_batch_first_tokens_get_equal_slots(policy):
    time, batch = 5, 3
    batch_first = logits(time * batch, seed=4).view(batch, time, E)
    torch.manual_seed(1)
    expected = route(batch_first.reshape(-1, E), 2, 0.5, drop_policy=policy)
    got = route(
        batch_first.transpose(0, 1).reshape(-1, E), 2, 0.5, drop_policy=policy,
        time_first=(time, batch),
    )  # fmt: skip
    slots = expected.slots_TK.view(batch, time, 2).transpose(0, 1).reshape(-1, 2)
    assert torch.equal(got.slots_TK, slots)


def test_the_rts_policy_drops_every_token_equally_often():
    drops = torch.zeros(12)
    torch.manual_seed(0)
    for _ in range(600):
        r = route(torch.zeros(12, E), 1, 1.0, drop_policy="rts", training=True)  # expert 0 keeps 3 tokens
        drops += (r.row_of_TK[:, 0] < 0).float()
    expected = 600 * 9 / 12
    chi_square = float(((drops - expected) ** 2 / (expected * (1 - 9 / 12))).sum())
    assert chi_square < 31.3  # A correct policy exceeds this chi-square value in one of 1000 runs.
