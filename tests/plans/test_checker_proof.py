"""The plan checker agrees with a search of all interleavings, and rejects edits that change a result."""

from collections import Counter, defaultdict
from fractions import Fraction
from random import Random

import plans
import pytest
from plan_edits import drawn, mutants, two_lanes
from plan_interleavings import Interleavings

from fairseq_tutel.plans.checker import PlanError, check
from fairseq_tutel.plans.checker.shape import check_shape
from fairseq_tutel.plans.executors.layout import walk

LONG = pytest.mark.long


def of_two(most):
    """Return the plan with two lanes, and all named plans of two ranks that have at most `most` steps."""
    return [two_lanes(), *(plan for plan in plans.of(2) if check(plan).steps <= most)]


def is_right(plan):
    try:
        check(plan)
    except PlanError:
        return False
    return True


def compare(plan):
    """Compare the checker's verdict on a plan with all interleavings, and return the verdict."""
    try:
        check_shape(plan)
    except PlanError:
        return "malformed"
    verdict, wrong = is_right(plan), Interleavings(plan).wrong()
    assert verdict == (wrong is None), f"{plan.programs}: {wrong}"
    return "right" if verdict else "wrong"


@pytest.mark.parametrize("most", [10, pytest.param(18, marks=LONG)])
def test_edited_plans_that_the_checker_accepts_are_correct_in_every_interleaving(most):
    found = Counter(compare(edited) for plan in of_two(most) for _, _, edited in mutants(plan))
    assert found["wrong"] > found["right"] and found["malformed"] > found["right"]


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=LONG)])
def test_accepted_edits_of_larger_plans_only_repeat_or_swap_steps(ranks):
    """Repeating a step or swapping independent steps does not change a result."""
    count, passed = Counter(), []
    for plan in plans.of(ranks):
        for kind, where, edited in mutants(plan):
            count[kind] += 1
            if is_right(edited):
                passed.append((plan.name, kind, where))
    assert {kind for _, kind, _ in passed} == {"twice", "swapped"}, passed
    repeated = [where for _, kind, where in passed if kind == "twice"]
    assert {where.split("(")[1] for where in repeated} == {"copy)", "flush)", "reduce)"}
    assert len(passed) < 0.22 * count.total()


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 10000), marks=LONG)])
def test_the_checker_agrees_with_a_search_of_all_interleavings(seeds):
    known, found = of_two(10), Counter()
    for seed in seeds:
        dice = Random(seed)
        plan = drawn(dice, dice.choice(known), dice.randrange(1, 4))
        if sum(1 for _ in plan.steps()) <= 13:
            found[compare(plan)] += 1
    assert min(found["right"], found["wrong"]) > len(seeds) / 10, found


@pytest.mark.parametrize("ranks", [3, 8])
def test_executors_and_the_checker_number_the_rounds_of_a_plan_equally(ranks):
    for plan in plans.of(ranks):
        loads = [defaultdict(Fraction) for _ in check(plan).loads]
        for move in walk(plan).moves:
            if move.op == "put":  # Executors number rounds from 1.
                part = Fraction(len(move.kinds), plan.in_chunks)
                loads[move.round - 1][move.ranks] += part
        assert tuple(loads) == check(plan).loads
