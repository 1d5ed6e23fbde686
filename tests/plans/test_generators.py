"""All named plans are correct and send the documented messages and bytes."""

from collections import Counter
from fractions import Fraction

import pytest

from fairseq_tutel.plans.checker import check
from fairseq_tutel.plans.format import Plan
from fairseq_tutel.plans.generators import GENERATORS, make, usual


def plans(name: str, counts=(2, 3, 4, 5, 6, 7, 8, 16)):
    """Return all plans that a generator makes for the given numbers of ranks."""
    generator = GENERATORS[name]
    for collective in generator.collectives:
        for ranks in counts:
            for nodes in range(1, ranks + 1 if generator.has_nodes else 2):
                if ranks % nodes == 0:
                    yield make(name, collective, ranks, nodes=nodes)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generated_plan_is_correct(name):
    for plan in plans(name):
        check(plan)


def sent(plan: Plan, rank: int, to=lambda peer: True) -> tuple[int, Fraction]:
    """Return the number of messages that a rank sends, and the sum of their sizes relative to `in`."""
    of_rank = [s for r, _, _, s in plan.steps() if r == rank and s.channel is not None]
    ours = [s for s in of_rank if to(plan.channels[s.channel].target)]
    puts = Counter()
    messages = 0
    for step in ours:
        if step.op == "put":
            puts[step.channel] += step.n
        elif step.op == "signal":
            messages += bool(puts.pop(step.channel, 0))
    chunks = sum(step.n for step in ours if step.op == "put")
    return messages, Fraction(chunks, plan.in_chunks)


@pytest.mark.parametrize(("name", "collective", "messages", "size", "depth"), [
    ("ring", "all_gather", lambda N: N - 1, lambda N: N - 1, lambda N: N),
    ("ring", "reduce_scatter", lambda N: N - 1, lambda N: Fraction(N - 1, N), lambda N: N - 1),
    ("ring", "all_reduce", lambda N: 2 * N - 2, lambda N: Fraction(2 * N - 2, N), lambda N: 2 * N - 2),
    ("one_phase", "all_gather", lambda N: N - 1, lambda N: N - 1, lambda N: 1),
    ("one_phase", "reduce_scatter", lambda N: N - 1, lambda N: Fraction(N - 1, N), lambda N: 1),
    ("one_phase", "all_reduce", lambda N: N - 1, lambda N: N - 1, lambda N: 1),
    ("two_phase", "all_reduce", lambda N: 2 * N - 2, lambda N: Fraction(2 * N - 2, N), lambda N: 2),
    ("linear", "all_to_all", lambda N: N - 1, lambda N: Fraction(N - 1, N), lambda N: 1),
])  # fmt: skip
def test_every_rank_sends_the_documented_messages_and_bytes(name, collective, messages, size, depth):
    for ranks in (2, 3, 5, 8):
        plan = make(name, collective, ranks)
        assert {sent(plan, r) for r in range(ranks)} == {(messages(ranks), size(ranks))}
        assert check(plan).depth == depth(ranks)


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 4), (3, 2)])
def test_hierarchical_plans_send_the_documented_messages_within_and_between_nodes(nodes, local):
    L, n = local, nodes
    for name, within, across in (
        ("hierarchical", (2 * (L - 1), Fraction(2 * (L - 1), L)), (n - 1, Fraction(n - 1, L))),
        ("two_hops", (L - 1, Fraction(L - 1, L)), (n - 1, Fraction(n - 1, n))),
    ):
        plan = make(name, GENERATORS[name].collectives[0], n * L, nodes=n)
        assert check(plan).depth == {"hierarchical": 3, "two_hops": 2}[name]
        for r in range(n * L):
            assert sent(plan, r, lambda peer, r=r: peer // L == r // L) == within
            assert sent(plan, r, lambda peer, r=r: peer // L != r // L) == across


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("spiral", "all_reduce", 4), "no plan 'spiral'; give one of ring"),
    (("linear", "reduce", 4), "linear cannot make 'reduce' plans; give all_to_all"),
    (("ring", "all_gather", 1), "A plan needs at least 2 ranks, but 1 was given"),
    (("hierarchical", "all_reduce", 4, 3), "4 ranks cannot be divided equally among 3 nodes"),
])  # fmt: skip
def test_invalid_arguments_of_a_plan_generator_raise_an_error(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(*arguments[:3], nodes=arguments[3] if len(arguments) > 3 else 1)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_the_usual_plans_of_a_collective_cover_all_byte_counts(collective):
    for ranks in (2, 3, 4, 8):
        least = 0
        for plan in usual(collective, ranks):
            assert (plan.collective, plan.ranks, plan.min_bytes) == (collective, ranks, least)
            least = None if plan.max_bytes is None else plan.max_bytes + 1
        assert least is None
    with pytest.raises(ValueError, match="cannot make 'broadcast' plans"):
        usual("broadcast", 2)
