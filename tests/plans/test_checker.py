"""The plan checker accepts correct plans, reports their cost, and rejects each kind of wrong plan."""

from dataclasses import replace
from fractions import Fraction

import pytest
from plan_edits import two_lanes, with_steps

from fairseq_tutel.plans.checker import PlanError, check
from fairseq_tutel.plans.format import Channel, Place, Step, Writer
from fairseq_tutel.plans.generators import make

ONE = make("one_phase", "all_reduce", 2)


def test_the_checker_reports_the_steps_and_depth_and_loads_of_a_plan():
    report = check(make("ring", "all_gather", 4))
    links = {(r, (r + 1) % 4) for r in range(4)}
    assert report.steps == 4 * 13 and report.depth == 4  # The depth counts a start signal and 3 transfers.
    assert report.bytes_of_link == dict.fromkeys(links, 3)
    assert report.loads == (dict.fromkeys(links, Fraction(1)),) * 3
    assert report.predicted(100, 1.0, lambda link: 2.0 if link == (0, 1) else 0.5) == 4 + 3 * 100 * 2
    assert check(two_lanes()).depth == 2


def test_only_the_first_two_terms_of_a_sum_may_swap():
    plan = make("one_phase", "all_reduce", 3)
    *_, step, _, _ = plan.programs[1][0]
    assert step.op == "reduce"
    a, b, c = step.src
    index = plan.programs[1][0].index(step)
    check(with_steps(plan, 1, 0, index, index + 1, replace(step, src=(b, a, c))))
    with pytest.raises(PlanError, match=r"rank 1, lane 0, step 6 \(reduce\) adds .* another order"):
        check(with_steps(plan, 1, 0, index, index + 1, replace(step, src=(a, c, b))))


def writing(*calls, ranks=2, collective="all_gather", chunks=1, temporary=2, **others):
    """Return a plan whose steps are made by the given calls of Writer methods."""
    w = Writer(ranks)
    for name, *arguments in calls:
        lane = arguments.pop() if isinstance(arguments[-1], dict) else {}
        getattr(w, name)(*arguments, **lane)
    plan = w.plan("it", collective, chunks, temporary=temporary)
    return replace(plan, **others)


IN, OUT, TMP = Place("in", 0), Place("out", 0), Place("tmp", 0)
OWN = ("copy", 0, IN, OUT)


@pytest.mark.parametrize(
    "plan, sentence",
    [
        # These plans are malformed.
        (replace(ONE, ranks=3), "it has 2 programs for 3 ranks"),
        (replace(ONE, temporary=10**9), "the buffers of all ranks have 2000000004 chunks"),
        (replace(ONE, channels=(Channel(0, 0),)), "channel 0 leads from rank 0 to rank 0"),
        (
            replace(ONE, channels=ONE.channels[:1]),
            "rank 0, lane 0, step 2 (wait) uses channel 1, but the plan has 1",
        ),
        (with_steps(ONE, 0, 0, 0, 0, Step("signal", 1)), "step 0 (signal) uses channel 1 from rank 1"),
        (with_steps(ONE, 0, 0, 3, 4, Step("reduce", None, (IN,), OUT, 1)), "step 3 (reduce) has 1 sources"),
        (writing(("put", 0, 1, IN, Place("tmp", 2))), "goes beyond the 2 chunks of tmp on rank 1"),
        (writing(("copy", 0, OUT, IN)), "rank 0, lane 0, step 0 (copy) writes to the buffer `in`, which"),
        (writing(("copy", 0, TMP, TMP)), "rank 0, lane 0, step 0 (copy) writes to chunks that it reads"),
        (
            writing(("signal", 0, 1), ("signal", 0, 1, {"lane": 1})),
            "uses channel 0, which lane 0 also uses",
        ),
        (writing(("put", 0, 1, IN, TMP)), "rank 0, lane 0, step 0 (put) has no signal after it"),
        (writing(("signal", 0, 1)), "rank 0, lane 0, step 0: channel 0 has 1 signals and 0 waits"),
        (writing(("pend", 1, 4, {"lane": 0})), "step 0: semaphore 4 has 0 posts and 1 pends"),
        # This plan has a deadlock.
        (
            writing(("wait", 0, 1), ("signal", 0, 1), ("wait", 1, 0), ("signal", 1, 0)),
            "deadlock: rank 0, lane 0, step 0 (wait) waits for rank 1, lane 0, step 1 (signal), which "
            "runs after rank 1, lane 0, step 0 (wait); rank 1, lane 0, step 0 (wait) waits for rank 0",
        ),
        # These plans have races within a call, with the caller, with the next call, and with a later call.
        (
            with_steps(ONE, 0, 0, 2, 4, *ONE.programs[0][0][3:1:-1]),
            "rank 0, lane 0, step 2 (reduce) and rank 1, lane 0, step 0 (put) access tmp[1] of rank 0",
        ),
        (
            writing(("put", 0, 1, IN, OUT), ("signal", 0, 1), ("wait", 1, 0), ("flush", 0, 1)),
            "the caller (before the call) and rank 0, lane 0, step 0 (put) access out[0] of rank 1",
        ),
        (
            with_steps(ONE, 0, 0, 4, 5),
            "rank 0, lane 0, step 0 (put) and the caller (before the call) access in[0] of rank 0 "
            "without a fixed order, and one writes; the second step is in the next call",
        ),
        (
            writing(("put", 0, 1, IN, TMP), ("signal", 0, 1), ("flush", 0, 1), ("wait", 1, 0)),
            "rank 0, lane 0, step 0 (put) and rank 0, lane 0, step 0 (put) access tmp[0] of rank 1 "
            "without a fixed order, and one writes; the second step is two calls later",
        ),
        # These plans read wrong data.
        (
            writing(("copy", 0, TMP, OUT)),
            "rank 0, lane 0, step 0 (copy) reads tmp[0], which is still empty",
        ),
        (
            writing(OWN, ("reduce", 0, [IN, OUT], TMP)),
            "rank 0, lane 0, step 1 (reduce) adds in[0] of rank 0 twice",
        ),
        (
            writing(("reduce", 0, [IN, Place("in", 1)], TMP), chunks=2),
            "rank 0, lane 0, step 0 (reduce) adds in[1] to in[0]",
        ),
        # These plans have a wrong result.
        (
            writing(OWN),
            "rank 0, lane 0, at the end: out[1] of rank 0 is empty; it must hold in[0] of rank 1",
        ),
        (
            writing(("copy", 1, IN, OUT), OWN, ranks=2, collective="all_reduce"),
            "step 0 (copy) leaves in[0] of rank 0 in out[0] of rank 0 instead of in[0] of ranks 0, 1",
        ),
    ],
)
def test_a_wrong_plan_raises_a_one_sentence_error(plan, sentence):
    with pytest.raises(PlanError) as refusal:
        check(plan)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)
