"""Plan files: a plan is read as it was written, and malformed content raises a one-sentence error."""

import json

import pytest
from plan_edits import two_lanes

from fairseq_tutel.plans.format import PlanError, from_json, to_json
from fairseq_tutel.plans.generators import make

ONE = make("one_phase", "all_reduce", 2)


@pytest.mark.parametrize("plan", [make("ring", "all_reduce", 3), two_lanes()], ids=lambda plan: plan.name)
def test_a_plan_is_read_as_it_was_written(plan):
    read = from_json(json.loads(json.dumps(to_json(plan))))
    assert read == plan and read.digest == plan.digest != ONE.digest


STEP = ("programs", 0, 0, 0)


@pytest.mark.parametrize(
    "path, value",
    [
        ((), []),
        (("format",), 2),
        (("ranks",), 0),
        (("chunks",), True),
        (("bytes",), 5),
        (("collective",), "broadcast"),
        (("channels", 0), [0]),
        (("channels", 0), [0, 1, "put"]),
        (("programs", 1, 0), 7),
        (("temporary",), 10**400),
        ((*STEP, "op"), "get"),
        (STEP, {"op": "wait"}),
        ((*STEP, "dst"), ["top", 0]),
        ((*STEP, "dst", 1), -1),
    ],
)
def test_malformed_content_raises_a_one_sentence_error(path, value):
    data = json.loads(json.dumps(to_json(ONE)))
    at = data
    for key in path[:-1]:
        at = at[key]
    if path:
        at[path[-1]] = value
    with pytest.raises(PlanError, match=r"^This is not a collective plan: [^\n]+$"):
        from_json(data if path else value)
