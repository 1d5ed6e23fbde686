"""The tests compare chosen experts and gate weights with loops and with expected frequencies."""

import math
import types

import oracle
import pytest
import torch
from compare import TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st
from normal import normal
from option_values import ROUTING, WAYS_TO_CHOOSE, config_of, draws, settings_of
from torch import Tensor

from fairseq_tutel import MoEConfig, kernels, route
from fairseq_tutel.moe.choice import choose, scores_of
from fairseq_tutel.moe.config import LAYER
from fairseq_tutel.moe.routing import decide
from fairseq_tutel.moe.slots import MicroBatch

E = 4
# Degrees of freedom -> the chi-square value that a correct sampler exceeds in one of 1000 runs.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 11: 31.26}


def logits(num_tokens: int, seed: int = 0, num_experts: int = E) -> Tensor:
    return normal(num_tokens, num_experts, seed=seed)


def score_lists(logits_TE: Tensor, function: str) -> list[list[float]]:
    """Compute the experts' scores for each token with Python floats."""
    rows = []
    for row in logits_TE.tolist():
        if function == "sigmoid":
            rows.append([1 / (1 + math.exp(-z)) for z in row])
        else:
            total = sum(math.exp(z) for z in row)
            rows.append([math.exp(z) / total for z in row])
    return rows


def weight_lists(scores, plan: oracle.Plan, normalize: str, scaling: float) -> list[list[float]]:
    """Compute gate weights by loops, with weight 0 for dropped assignments."""
    rows = []
    for t, ids in enumerate(plan.expert_ids):
        weights = [scores[t][e] for e in ids]
        kept = plan.kept[t]
        if normalize == "before" and len(ids) > 1:
            weights = [w / sum(weights) for w in weights]
        if normalize == "after" and len(ids) > 1:
            left = sum(w for w, k in zip(weights, kept, strict=True) if k)
            weights = [w / left if left else 0.0 for w in weights]
        rows.append([scaling * w * k for w, k in zip(weights, kept, strict=True)])
    return rows


def kept_weights(r) -> Tensor:
    return r.weights_TK.masked_fill(r.row_of_TK < 0, 0.0)


def chi_square(counts: Tensor, probs: Tensor) -> float:
    expected = probs.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("function", ("softmax", "sigmoid"))
@pytest.mark.parametrize("normalize", ("before", "after", "none"))
@pytest.mark.parametrize("top_k", range(1, E + 1))
@pytest.mark.parametrize("factor", (0.0, 0.5))
def test_scores_and_gate_weights_equal_a_computation_by_loops(function, normalize, top_k, factor):
    logits_TE, real = logits(17, seed=top_k), [t % 5 != 3 for t in range(17)]
    r = route(
        logits_TE, top_k, factor, real_T=torch.tensor(real), score_function=function,
        normalize_gate=normalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    scores = score_lists(logits_TE, function)
    plan = oracle.plan(scores, top_k, factor, real)
    assert r.expert_ids_TK.tolist() == plan.expert_ids
    assert (r.row_of_TK >= 0).tolist() == plan.kept
    expected = torch.tensor(weight_lists(scores, plan, normalize, 2.5), dtype=torch.float64)
    torch.testing.assert_close(kept_weights(r), expected)
    probs = torch.tensor([[s / sum(row) for s in row] for row in scores], dtype=torch.float64)
    torch.testing.assert_close(r.probs_TE, probs)


@pytest.mark.parametrize("function", ("softmax", "sigmoid"))
@pytest.mark.parametrize("normalize", ("before", "after", "none"))
@pytest.mark.parametrize("top_k", (1, 3))
def test_gate_weight_gradients_equal_finite_differences(function, normalize, top_k):
    def weights(logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        r = route(
            logits_TE, top_k, 0.7, score_function=function, normalize_gate=normalize,
            routed_scaling_factor=0.5,
        )  # fmt: skip
        return kept_weights(r), r.probs_TE

    assert torch.autograd.gradcheck(weights, (logits(6).requires_grad_(),))


def outside_groups(scores, groups: int, kept: int, top_k: int) -> list[list[float]]:
    """Set scores to -inf, by loops, for every expert group that a token may not choose."""
    rows = []
    for row in scores:
        size = len(row) // groups
        members = [row[g * size : (g + 1) * size] for g in range(groups)]
        best = max(top_k // kept, 1)
        value = [math.fsum(sorted(m, reverse=True)[:best]) for m in members]
        opened = sorted(range(groups), key=lambda g, v=value: (-v[g], g))[:kept]
        rows.append([s if e // size in opened else -math.inf for e, s in enumerate(row)])
    return rows


@settings(max_examples=150, deadline=None)
@given(data=st.data(), groups=st.integers(1, 4), size=st.integers(1, 4), function=st.booleans())
def test_group_limited_routing_equals_brute_force(data, groups, size, function):
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, kept * size))
    num_tokens = data.draw(st.integers(0, 6))
    values = st.lists(st.integers(0, 3), min_size=groups * size, max_size=groups * size)
    # The logits have few different values, which causes many ties between experts and between groups.
    rows = [data.draw(values) for _ in range(num_tokens)]
    logits_TE = torch.tensor(rows, dtype=torch.float64).view(num_tokens, groups * size)
    name = "sigmoid" if function else "softmax"
    scores = scores_of(logits_TE, name)[0].tolist()
    rules = {"score_function": name, "expert_groups": groups, "groups_per_token": kept}
    r = route(logits_TE, top_k, 0.5, **rules)
    plan = oracle.plan(outside_groups(scores, groups, kept, top_k), top_k, 0.5)
    assert r.expert_ids_TK.tolist() == plan.expert_ids
    assert r.slots_TK.tolist() == plan.slots


def test_a_balance_bias_changes_the_chosen_experts_but_not_weights_or_probabilities():
    logits_TE = logits(30).requires_grad_()
    bias_E = torch.tensor([10.0, 0, 0, -10])
    r = route(logits_TE, 2, bias_E=bias_E, normalize_gate="none")
    scores = torch.softmax(logits_TE, 1)
    biased = (scores.detach() + bias_E).tolist()
    assert r.expert_ids_TK.tolist() == oracle.plan(biased, 2).expert_ids
    assert (r.expert_ids_TK[:, 0] == 0).all() and not (r.expert_ids_TK == 3).any()
    torch.testing.assert_close(r.weights_TK, scores.gather(1, r.expert_ids_TK))
    torch.testing.assert_close(r.probs_TE, scores)


ROW = torch.tensor([0.0, 1.0, 2.0, -1.0])
MANY = 6000


def sampled(function: str, top_k: int, **rules) -> Tensor:
    """Route many tokens with the logits `ROW`, and return their chosen experts."""
    torch.manual_seed(1)
    r = route(ROW.expand(MANY, E), top_k, training=True, score_function=function, **rules)
    return r.expert_ids_TK


@pytest.mark.parametrize("function", ("softmax", "sigmoid"))
def test_rsample_samples_experts_without_replacement(function):
    ids_TK = sampled(function, 2, rsample=True)
    probs = scores_of(ROW[None], function)[1][0].tolist()
    pairs = [(a, b) for a in range(E) for b in range(E) if a != b]
    counts = torch.tensor([int(((ids_TK[:, 0] == a) & (ids_TK[:, 1] == b)).sum()) for a, b in pairs])
    assert int(counts.sum()) == MANY
    expected = torch.tensor([probs[a] * probs[b] / (1 - probs[a]) for a, b in pairs])
    assert chi_square(counts, expected) < CRITICAL[11]


@pytest.mark.parametrize("function", ("softmax", "sigmoid"))
def test_second_expert_policy_sampling_keeps_the_first_choice(function):
    ids_TK = sampled(function, 2, second_expert_policy="sampling")
    assert (ids_TK[:, 0] == 2).all()
    probs_E = scores_of(ROW[None], function)[1][0]
    others = [0, 1, 3]
    counts_E = ids_TK[:, 1].bincount(minlength=E)
    assert counts_E[2] == 0
    assert chi_square(counts_E[others], probs_E[others] / (1 - probs_E[2])) < CRITICAL[2]


DRAWING = [way for way in WAYS_TO_CHOOSE if draws(way)]


@pytest.mark.parametrize("options", DRAWING, ids=str)
def test_choices_are_random_only_in_training_and_equal_for_equal_seeds(options):
    def run(training: bool):
        torch.manual_seed(4)
        return route(logits(30), 3, 0.5, training=training, **options)

    first, again = run(True), run(True)
    assert torch.equal(first.row_of_TK, again.row_of_TK)
    plain = route(logits(30), 3, 0.5)
    assert not torch.equal(first.row_of_TK, plain.row_of_TK)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    assert torch.equal(run(False).row_of_TK, plain.row_of_TK)
    assert torch.equal(torch.get_rng_state(), state)


@settings(max_examples=100, deadline=None)
@given(
    scale=st.sampled_from([0.0, 1.0, 100.0, 1e4, math.inf]),
    top_k=st.integers(1, 6),
    dtype=st.sampled_from(list(TOLERANCE)),
    function=st.sampled_from(["softmax", "sigmoid"]),
    options=st.sampled_from(WAYS_TO_CHOOSE),
    groups=st.sampled_from([(1, 1), (3, 3), (3, 2), (2, 1)]),
    seed=st.integers(0, 100),
)
def test_no_token_chooses_an_expert_twice(scale, top_k, dtype, function, options, groups, seed):
    """A token chooses distinct experts even if probabilities underflow or a gate sets logits to -inf."""
    num_groups, kept = groups
    size = 6 // num_groups
    top_k = min(top_k, kept * size)
    logits_TE = logits(5, seed, 6)
    if math.isinf(scale):  # The logits exclude all experts except one.
        logits_TE = torch.where(logits_TE == logits_TE.amax(1, keepdim=True), 0.0, -math.inf)
    else:
        logits_TE = logits_TE * scale
    torch.manual_seed(seed)
    rules = {"score_function": function, "expert_groups": num_groups, "groups_per_token": kept}
    r = route(logits_TE.to(dtype), top_k, training=True, **rules, **options)
    for ids in r.expert_ids_TK.tolist():
        assert len(set(ids)) == top_k
        assert len({e // size for e in ids}) <= kept


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("normalize", ("before", "none"))
def test_second_expert_policy_random_keeps_an_expert_with_probability_top_k_times_weight(dtype, normalize):
    row = torch.tensor([0.62, 0.27, 0.1, 0.01]).log()
    torch.manual_seed(3)
    r = route(
        row.to(dtype).expand(4 * MANY, E), 3, training=True, second_expert_policy="random",
        normalize_gate=normalize,
    )  # fmt: skip
    requested_TK = r.slots_TK >= 0
    assert requested_TK[:, 0].all()
    for j in (1, 2):
        chance = min(1.0, 3 * float(r.weights_TK[0, j]))
        taken = int(requested_TK[:, j].sum())
        counts = torch.tensor([taken, len(requested_TK) - taken])
        assert 0.2 < chance < 1
        assert chi_square(counts, torch.tensor([chance, 1 - chance])) < CRITICAL[1]


@pytest.mark.parametrize("policy", LAYER["drop_policy"].choices)
@pytest.mark.parametrize("factor", (0.0, 0.5))
def test_an_assignment_left_out_by_second_expert_policy_random_uses_no_slot(policy, factor):
    logits_TE, real_T = logits(40, seed=1), torch.arange(40) % 6 != 2
    torch.manual_seed(5)
    r = route(
        logits_TE, 3, factor, training=True, second_expert_policy="random", drop_policy=policy,
        real_T=real_T,
    )  # fmt: skip
    requested_TK = r.slots_TK >= 0
    assert torch.equal(requested_TK[:, 0], real_T)
    assert not requested_TK[~real_T].any()
    assert 0 < int(requested_TK[:, 1:].sum()) < 2 * int(real_T.sum())
    limit = 3 * math.ceil(factor * int(real_T.sum()) / E) if factor else math.inf
    for e in range(E):
        slots = r.slots_TK[requested_TK & (r.expert_ids_TK == e)].tolist()
        assert sorted(slots) == list(range(len(slots)))
        assert int(r.counts_E[e]) == min(len(slots), limit)
        for j in range(3):
            mine = requested_TK[:, j] & (r.expert_ids_TK[:, j] == e)
            assert int(r.assigned_KE[j, e]) == int(mine.sum())
    kept_TK = r.row_of_TK >= 0
    assert torch.equal(r.dropped_K, (requested_TK & ~kept_TK).sum(dim=0))
    assert int(r.num_tokens) == int(real_T.sum())
    assert torch.equal(kept_TK, requested_TK & (r.slots_TK < limit))


EVERYTHING = (
    {"score_function": "sigmoid", "normalize_gate": "after"},
    {"expert_groups": 2, "groups_per_token": 2, "routed_scaling_factor": 3.0},
    *WAYS_TO_CHOOSE,
)


@pytest.mark.parametrize("options", EVERYTHING, ids=str)
@pytest.mark.parametrize("num_tokens, real", [(0, True), (1, True), (3, False)])
def test_zero_tokens_and_one_token_and_only_padding_can_be_routed(options, num_tokens, real):
    real_T = torch.full((num_tokens,), real)
    logits_TE = logits(num_tokens).requires_grad_()
    r = route(logits_TE, 2, 0.5, training=True, real_T=real_T, **options)
    count = num_tokens if real else 0
    assert int(r.num_tokens) == count == int(r.assigned_KE[0].sum())
    assert ((r.slots_TK >= 0).any(dim=1) == real_T).all()
    assert int(r.counts_E.sum()) == int((r.row_of_TK >= 0).sum())
    (grad,) = torch.autograd.grad(r.weights_TK.sum() + r.probs_TE.sum(), logits_TE)
    assert grad.isfinite().all()


def test_the_table_of_ways_to_choose_has_every_option_that_changes_choices_only_in_training():
    def choices(settings: dict, training: bool) -> list[Tensor]:
        torch.manual_seed(0)
        r = decide(logits(60), config_of(settings), MicroBatch(top_k=2, training=training))
        return [r.expert_ids_TK, r.slots_TK >= 0]

    def changes(settings: dict, training: bool) -> bool:
        return not all(map(torch.equal, choices(settings, training), choices({}, training)))

    found = {
        name for name in ROUTING for s in settings_of(name) if changes(s, True) and not changes(s, False)
    }
    assert found == {name for way in WAYS_TO_CHOOSE for name in way}


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("name", LAYER)
def test_the_softmax_top_k_kernel_does_not_change_the_effect_of_an_option(name, training, monkeypatch):
    """The test fails if an option changes the choice of experts and has no line in `ways_of`."""
    launched = []

    def softmax_top_k(*given):
        launched.append(given)
        return kernels.reference.softmax_top_k(*given)

    def choose_by(ops, config: MoEConfig) -> list[Tensor]:
        monkeypatch.setattr(kernels, "ops", lambda *_: ops)
        torch.manual_seed(0)
        chosen = choose(logits(60), config, MicroBatch(top_k=2, training=training))
        return [chosen.expert_ids_TK, chosen.weights_TK, chosen.probs_TE, chosen.scores_TE]

    fused = types.SimpleNamespace(softmax_top_k=softmax_top_k)
    plain = choose_by(fused, MoEConfig(1, 1, E))
    assert len(launched) == 1
    tried = [c for c in map(config_of, settings_of(name)) if c.num_experts == E]
    assert tried or name == "num_experts", "add values to VALUES, or what it needs to NEEDED"
    for config in tried:
        launched.clear()
        expected, got = (choose_by(ops, config) for ops in (kernels.reference, fused))
        assert all(map(torch.equal, got, expected)), config
        if not torch.equal(expected[0], plain[0]):
            assert not launched, config
