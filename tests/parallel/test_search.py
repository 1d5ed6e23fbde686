"""The strategy search finds the fastest strategy in few updates."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_tutel.parallel.search import MOST_CANDIDATES, ROUNDS, StrategySearch
from fairseq_tutel.parallel.strategy import Strategy

RS = (0, 1, 2, 4, 8, 16)
OVERLAPS, ALGORITHMS = (1, 2, 4, 8), ("linear", "2dh")
EVERY = [
    Strategy(adaptive_r=r, overlap=d, algorithm=a)
    for r, d, a in itertools.product(RS, OVERLAPS, ALGORITHMS)
]


def tuner():
    return StrategySearch(RS, OVERLAPS, ALGORITHMS, Strategy())


def search(tuner, cost, key="0", predict=None):
    """Run a complete strategy search, and return the strategies in the order of the updates."""
    ran = []
    while not tuner.settled(key):
        ran.append(tuner.choose(key, predict))
        tuner.record(key, ran[-1], cost(ran[-1]))
        assert len(ran) <= len(EVERY) * (1 + ROUNDS)
    return ran


def model(gather, send, overlap_gain, far):
    """Return a cost function: weights come from 16 / adaptive_r ranks, and rows go to adaptive_r ranks."""

    def cost(strategy):
        if strategy.adaptive_r == 0:
            return 1.0 + gather * 16
        exchange = send * strategy.adaptive_r * (far if strategy.algorithm == "linear" else 1.0)
        hidden = overlap_gain * min(exchange, 1.0) * (1 - 1 / strategy.overlap)
        return 1.0 + gather * 16 / strategy.adaptive_r + exchange - hidden + 0.01 * strategy.overlap

    return cost


@settings(max_examples=20, deadline=None)
@given(st.floats(0.001, 1), st.floats(0.001, 1), st.floats(0, 0.9), st.floats(0.5, 2))
def test_the_strategy_search_finds_the_lowest_cost_if_costs_have_no_noise(gather, send, gain, far):
    cost = model(gather, send, gain, far)
    found = tuner()
    search(found, cost)
    assert cost(found.choose("0")) == min(map(cost, EVERY))


def test_predicted_costs_choose_and_order_the_candidates_of_the_search():
    cost = model(0.05, 0.3, 0.8, 1.5)
    ran = search(tuner(), cost, predict=cost)
    ranked = sorted(set(EVERY) & set(ran), key=cost)
    assert len(ranked) <= MOST_CANDIDATES + 1 and Strategy() in ranked
    assert list(dict.fromkeys(ran))[:MOST_CANDIDATES] == [s for s in ranked if s in ran[:24]]
    assert len(ran) < len(search(tuner(), cost)) / 2


def test_slower_candidates_drop_out_of_the_search_in_earlier_rounds():
    found = StrategySearch((1,), (1, 2, 4, 8), ("linear",))
    factors = {1: 1.0, 2: 1.05, 4: 1.5, 8: 2.0}
    ran = search(found, lambda strategy: factors[strategy.overlap])
    counts = {d: sum(s.overlap == d for s in ran) - 1 for d in factors}
    assert counts == {1: ROUNDS, 2: ROUNDS, 4: 3, 8: 2}


def test_the_search_does_not_count_the_first_update_of_a_candidate_in_a_capacity_range():
    found = StrategySearch((1,), (1, 2, 4, 8), ("linear",))
    for key in ("early", "late"):
        ran = set()

        def cost(strategy, ran=ran):
            first = strategy not in ran
            ran.add(strategy)
            return (1.6 if strategy.overlap == 1 else 1.0) * (1000 if first else 1)

        search(found, cost, key)
        assert found.choose(key).overlap > 1
        assert max(map(max, found.costs[key].values())) == 1.6


def test_the_search_repeats_updates_without_a_measurement():
    found = StrategySearch((1,), (1, 2), ("linear",))
    chosen = found.choose("0")
    for _ in range(3 * ROUNDS):
        found.record("0", chosen, float("nan"))
        found.record("0", Strategy(overlap=8), 1.0)
        found.record("another", chosen, 1.0)
    assert found.choose("0") == chosen and not found.settled("0")


@pytest.mark.parametrize(
    "wrong", [{"adaptive_r": -1}, {"overlap": 0}, {"overlap": 2.5}, {"algorithm": "foo"}]
)
def test_an_invalid_strategy_raises_a_one_sentence_error(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}; give "):
        Strategy(**wrong)
