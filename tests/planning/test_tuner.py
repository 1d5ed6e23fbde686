"""The tuner finds the best of a synthetic cost, by few steps.

Covered: every unimodal cost over r with any pair effects; r = 0; a bound on the steps; noise, and a drift;
the run-off; hopeless candidates, and good ones with a slow sample; costs that are no numbers; keys apart
from each other; from a neighbour's best; a settled cost that drifts; the same choice from the same costs;
saved and loaded; what cannot be chosen here is not loaded.
"""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_tutel.planning.strategy import Strategy
from fairseq_tutel.planning.tuner import FINALISTS, RUN_OFF, TRIALS, WATCHED, Tuner

RS = (0, 1, 2, 4, 8, 16)
OVERLAPS, ALGORITHMS = (1, 2, 4, 8), ("linear", "2dh")
EVERY = [
    Strategy(adaptive_r=r, overlap=d, algorithm=a)
    for r, d, a in itertools.product(RS, OVERLAPS, ALGORITHMS)
]


def tuner():
    return Tuner(RS, OVERLAPS, ALGORITHMS)


def search(tuner, cost, key="0", start=None):
    """Run a whole search; return what was run."""
    ran = []
    while not tuner.settled(key):
        ran.append(tuner.choose(key, start))
        tuner.record(key, ran[-1], cost(ran[-1]))
        assert len(ran) <= tuner.most_steps()
    return ran


def model(gather, send, overlap_gain, far):
    """Weights gathered over s / r ranks, rows sent to r: falls, then rises."""

    def cost(strategy):
        if strategy.adaptive_r == 0:
            return 1.0 + gather * 16
        exchange = send * strategy.adaptive_r * (far if strategy.algorithm == "linear" else 1.0)
        hidden = overlap_gain * min(exchange, 1.0) * (1 - 1 / strategy.overlap)
        return 1.0 + gather * 16 / strategy.adaptive_r + exchange - hidden + 0.01 * strategy.overlap

    return cost


@given(
    st.floats(0.001, 1), st.floats(0.001, 1), st.floats(0, 0.9), st.floats(0.5, 2)
)  # fmt: skip
def test_the_best_of_a_unimodal_cost_is_found_within_five_percent(gather, send, gain, far):
    cost = model(gather, send, gain, far)
    found = tuner()
    search(found, cost)
    assert cost(found.choose("0")) <= 1.05 * min(map(cost, EVERY))


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=5), st.integers(0, 4))
def test_the_least_of_a_strictly_unimodal_sequence_is_found_exactly(numbers, at):
    falling = sorted({*numbers, 11, 12, 13, 14}, reverse=True)[:at]
    costs = [*falling, 0.05, *[20 + i for i in range(4 - at)]]
    by_r = dict(zip(RS[1:], costs, strict=True))
    found = Tuner(RS[1:], (1,), ("linear",))
    search(found, lambda strategy: by_r[strategy.adaptive_r])
    assert found.choose("0").adaptive_r == RS[1:][at]


def test_r_is_searched_in_few_steps_and_not_one_by_one():
    many = tuple(range(1, 65))
    found = Tuner(many, (1,), ("linear",))
    ran = search(found, lambda strategy: (strategy.adaptive_r - 41) ** 2 + 1)
    assert found.choose("0").adaptive_r == 41
    assert len({strategy.adaptive_r for strategy in ran}) <= 20


def test_no_rows_sent_is_found_where_it_is_best():
    found = tuner()
    search(found, lambda strategy: 1.0 if strategy.adaptive_r == 0 else 2.0)
    assert found.choose("0").adaptive_r == 0


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_ten_percent_costs_little(seed):
    rng = random.Random(seed)
    cost = model(0.05, 0.3, 0.8, 1.5)
    found = tuner()
    search(
        found,
        lambda strategy: cost(strategy) * rng.uniform(1.0, 1.1) * (3 if rng.random() < 0.1 else 1),
    )
    assert cost(found.choose("0")) <= 1.1 * min(map(cost, EVERY))


def test_a_machine_that_slows_down_in_the_run_off_changes_no_choice():
    """What lost before is not compared with times from after."""
    found = Tuner((1,), (1, 2, 4), ("linear",))
    true = {1: 1.0, 2: 1.05, 4: 1.15}
    ran = []

    def cost(strategy):
        ran.append(strategy)
        warm, measured = 3, 3 * TRIALS
        return true[strategy.overlap] * (1.25 if len(ran) > warm + measured else 1.0)

    search(found, cost)
    assert found.choose("0").overlap == 1


def test_the_run_off_mends_what_noise_ranked_wrongly():
    """Measured first a tenth too dear, the best is the best all the same; turns meet a drift alike."""
    found = Tuner((1,), (1, 2, 4), ("linear",))
    true, ran = {1: 1.0, 2: 1.03, 4: 1.5}, []
    first_round = 3 * (1 + TRIALS)

    def cost(strategy):
        ran.append(strategy.overlap)
        lucky = 1.07 if strategy.overlap == 1 and len(ran) <= first_round else 1.0
        return true[strategy.overlap] * lucky * (1 + 0.001 * len(ran))

    search(found, cost)
    assert found.choose("0").overlap == 1
    assert ran[first_round:] == [2, 1] * RUN_OFF * TRIALS


def test_no_more_than_the_best_few_meet_in_the_run_off():
    found = Tuner((1,), (1, 2, 4, 8), ("linear", "2dh"))
    ran = search(found, lambda strategy: 1 + 0.001 * strategy.overlap)
    last = ran[-FINALISTS * RUN_OFF * TRIALS :]
    assert len(set(last)) == FINALISTS and last == last[:FINALISTS] * RUN_OFF * TRIALS
    assert len(ran) == 8 * (1 + TRIALS) + len(last)


def test_a_hopeless_candidate_is_measured_twice_and_no_more():
    found = Tuner((0, 1), (1,), ("linear",))
    ran = search(found, lambda strategy: 100.0 if strategy.adaptive_r == 0 else 1.0)
    assert sum(strategy.adaptive_r == 0 for strategy in ran) == 1 + 2


def test_one_slow_sample_drops_no_candidate():
    found = Tuner((1,), (1, 2), ("linear",))
    ran = []

    def cost(strategy):
        ran.append(strategy.overlap)
        return (1.0 if strategy.overlap == 2 else 1.5) * (10 if ran == [1] * 4 + [2] * 2 else 1)

    search(found, cost)
    assert found.choose("0").overlap == 2


def test_the_first_steps_of_a_later_key_are_not_counted_either():
    found = Tuner((1,), (1, 2, 4, 8), ("linear",))
    for key in ("early", "late"):
        ran = set()

        def cost(strategy, ran=ran):
            first = strategy not in ran
            ran.add(strategy)
            return (1.6 if strategy.overlap == 1 else 1.0) * (4 if first else 1)

        search(found, cost, key)
        assert found.choose(key).overlap > 1
        assert max(map(max, found.costs[key].values())) == 1.6


def test_a_neighbour_s_best_spares_the_search_of_what_is_bad():
    cost, near = model(0.05, 0.3, 0.8, 1.5), model(0.04, 0.35, 0.8, 1.5)
    least, from_nothing, found = min(map(near, EVERY)), tuner(), tuner()
    search(found, cost)
    lost = sum(near(strategy) - least for strategy in search(from_nothing, near))
    start = found.choose("0")
    ran = search(found, near, "1", start)
    assert ran[0] == start and near(found.choose("1")) <= 1.05 * least
    assert sum(near(strategy) - least for strategy in ran) < lost / 2


@pytest.mark.parametrize(
    "start", [Strategy(adaptive_r=0), Strategy(adaptive_r=16, overlap=8), Strategy(overlap=3)]
)
def test_a_neighbour_that_is_none_costs_steps_and_not_the_best(start):
    cost = model(0.02, 0.6, 0.5, 1.8)
    found = tuner()
    search(found, cost, start=start)
    assert cost(found.choose("0")) <= 1.05 * min(map(cost, EVERY))


@pytest.mark.parametrize(("factor", "anew"), [(1.15, False), (1.5, True), (0.6, True)])
def test_a_settled_cost_that_drifts_is_measured_anew(factor, anew):
    found = Tuner((1,), (1, 2, 4), ("linear",))
    search(found, lambda strategy: 1.0 + 0.2 * strategy.overlap)
    assert found.choose("0").overlap == 1
    for i in range(2 * WATCHED):  # a spike now and then is no drift
        found.record("0", found.choose("0"), 1.2 * (9 if i % WATCHED == 1 else 1))
    assert found.settled("0")
    for _ in range(WATCHED):
        found.record("0", Strategy(overlap=1), 1.2 * factor)
    assert found.settled("0") == (not anew)
    if anew:
        assert found.choose("0").overlap == 1
        search(found, lambda strategy: 3.0 - 0.2 * strategy.overlap)
        assert found.choose("0").overlap == 4


def test_equal_costs_choose_equally():
    cost = model(0.1, 0.2, 0.5, 1.2)
    first, second = tuner(), tuner()
    assert search(first, cost) == search(second, cost)
    assert first.choose("0") == second.choose("0")


def test_the_first_step_of_a_candidate_is_not_counted():
    found = Tuner((1,), (1, 2), ("linear",))
    ran = set()

    def cost(strategy):
        first = strategy not in ran
        ran.add(strategy)
        return 1000.0 if first else float(strategy.overlap)

    search(found, cost)
    assert found.choose("0").overlap == 1
    assert max(map(max, found.costs["0"].values())) == 2.0


def test_steps_that_are_no_measurement_are_tried_again():
    found = Tuner((1,), (1, 2), ("linear",))
    asked = found.choose("0")
    for _ in range(3 * TRIALS):
        found.record("0", asked, float("nan"))
        found.record("0", Strategy(overlap=8), 1.0)
        found.record("another", asked, 1.0)
    assert found.choose("0") == asked and not found.settled("0")


def test_every_key_has_a_search_of_its_own():
    found = tuner()
    search(found, lambda strategy: 1.0 + strategy.overlap, "small")
    search(found, lambda strategy: 10.0 - strategy.overlap, "large")
    assert found.choose("small").overlap == 1
    assert found.choose("large").overlap == 8


def test_a_saved_tuner_goes_on_where_it_was():
    found = tuner()
    search(found, model(0.1, 0.2, 0.5, 1.2))
    found.choose("begun")
    for _ in range(7):
        found.record("begun", found.choose("begun"), 1.0)
    state = json.loads(json.dumps(found.state()))
    assert set(state) == {"0", "begun"}
    again = tuner()
    assert again.load(state) == 0
    assert again.settled("0") and again.choose("0") == found.choose("0")
    # A search that had begun goes on where it was.
    assert not again.settled("begun") and again.choose("begun") == found.choose("begun")
    assert again.state() == state
    for _ in range(WATCHED):  # what was loaded is watched too
        again.record("0", again.choose("0"), 99.0)
    assert not again.settled("0")
    smaller = Tuner((0, 1), (1,), ("linear",))
    can = smaller._can_choose(found.choose("0"))
    assert smaller.load(state) == (not can) and smaller.settled("0") == can


def test_a_search_goes_on_from_every_point_at_which_it_was_saved():
    """Also in the run-off, where the way that sends no rows may be the best so far."""

    def cost(strategy):
        return 1.0 if strategy.adaptive_r == 0 else 1.04 + 0.03 * strategy.overlap

    found = Tuner((0, 1, 2), (1, 2), ("linear",))
    for _ in range(found.most_steps()):
        again = Tuner(found.rs, found.overlaps, found.algorithms)
        again.load(json.loads(json.dumps(found.state())))
        search(again, cost)
        assert again.choose("0").adaptive_r == 0
        found.record("0", found.choose("0"), cost(found.choose("0")))
    assert found.settled("0")


@pytest.mark.parametrize(
    "state", [[3], {"0": 3}, {"0": {"best": {"r": 1}, "costs": []}}, {"0": {}}]
)
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="no state of a tuner"):
        tuner().load(state)


@pytest.mark.parametrize(
    "wrong", [{"adaptive_r": -1}, {"overlap": 0}, {"overlap": 2.5}, {"algorithm": "foo"}]
)
def test_a_how_that_there_is_not_is_refused_in_a_sentence(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}; give "):
        Strategy(**wrong)
