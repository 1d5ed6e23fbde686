"""The checker agrees with a search of all interleavings, and accepts no edit that changes a plan's result.

Covered: each deletion, duplication, swap of adjacent steps and changed offset in the plans by name; random
edits of small plans; the executors' rounds.
"""

from collections import Counter, defaultdict
from fractions import Fraction
from random import Random

import pytest
from plan_edits import drawn, mutants, relay, two_lanes, with_steps
from plan_interleavings import Interleavings

from fairseq_tutel.plans.checker import PlanError, check
from fairseq_tutel.plans.checker.shape import check_shape
from fairseq_tutel.plans.executors.layout import walk
from fairseq_tutel.plans.generators import GENERATORS, make

LONG = pytest.mark.long


def by_name(ranks, most=10**6):
    """Yield all plans by name with at most `most` steps."""
    for name, generator in GENERATORS.items():
        for collective in generator.collectives:
            for nodes in (1, ranks) if "nodes" in generator.options else (1,):
                if not (ranks == 3 and name == "recursive_doubling"):
                    plan = make(name, collective, ranks, nodes=nodes)
                    if check(plan).steps <= most:
                        yield plan


def is_right(plan):
    try:
        check(plan)
    except PlanError:
        return False
    return True


def compare(plan):
    """Compare the checker with all interleavings of a well-formed plan; return the verdict."""
    try:
        check_shape(plan)
    except PlanError:
        return "malformed"
    verdict, wrong = is_right(plan), Interleavings(plan).wrong()
    assert verdict == (wrong is None), f"{plan.programs}: {wrong}"
    return "right" if verdict else "wrong"


# Of two ranks, 8 and 10 steps take up to 50 ms, 18 up to 0.3 s.
@pytest.mark.parametrize("most", [8, pytest.param(18, marks=LONG)])
def test_edits_that_pass_are_right_in_every_interleaving(most):
    plans = [two_lanes(), relay(), *by_name(2, most)]
    found = Counter(compare(edited) for plan in plans for _, _, edited in mutants(plan))
    assert found["wrong"] > found["right"] and found["malformed"] > found["right"]


# The one accepted deletion: a later signal of the reader makes this flush unnecessary.
NEEDLESS = [("tree reduce", "deleted", "rank 2, lane 0, step 6 (flush)")]


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=LONG)])
def test_edits_of_larger_plans_that_pass_change_nothing(ranks):
    """Accepted edits repeat a step, or swap adjacent steps that need no order.

    A signal and a wait need none where neither end waits for both, a flush and what it does not protect.
    """
    count, passed = Counter(), []
    for plan in by_name(ranks):
        for kind, where, edited in mutants(plan):
            count[kind] += 1
            if is_right(edited):
                passed.append((plan.name, kind, where))
    assert [each for each in passed if each[1] not in ("twice", "swapped")] == NEEDLESS * (ranks == 4)
    repeated = [where for _, kind, where in passed if kind == "twice"]
    assert {where.split("(")[1] for where in repeated} == {"copy)", "flush)", "reduce)"}
    assert len(passed) < 0.22 * count.total()


def without_answer():
    """Return `relay` without the signal to the root, which may be ahead by any number of calls."""
    return with_steps(with_steps(relay(), 0, 0, 4, 5), 2, 0, 2, 3)


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 10000), marks=LONG)])
def test_the_verdict_is_that_of_all_interleavings(seeds):
    plans = [two_lanes(), relay(), without_answer(), *by_name(2, 10)]
    found = Counter()
    for seed in seeds:
        dice = Random(seed)
        plan = drawn(dice, dice.choice(plans), dice.randrange(1, 4))
        if sum(1 for _ in plan.steps()) <= 12:
            found[compare(plan)] += 1
    assert min(found["right"], found["wrong"]) > len(seeds) / 10


@pytest.mark.parametrize("ranks", [3, 8])
def test_executors_take_the_same_rounds(ranks):
    for plan in by_name(ranks):
        loads = [defaultdict(Fraction) for _ in check(plan).loads]
        for move in walk(plan).moves:
            if move.step.op == "put":  # rounds of executors begin with 1
                part = Fraction(len(move.kinds), plan.in_chunks)
                loads[move.round - 1][move.rank, move.target] += part
        assert tuple(loads) == check(plan).loads
