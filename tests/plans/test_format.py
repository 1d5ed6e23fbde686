"""A plan's file: it is read as written, and other content is refused in one sentence."""

import json

import pytest
from plan_edits import in_packets, two_lanes

from fairseq_tutel.plans.format import from_json, to_json
from fairseq_tutel.plans.generators import make

ONE = make("one_phase", "all_reduce", 2)


@pytest.mark.parametrize(
    "plan", [in_packets(make("ring", "all_reduce", 3)), two_lanes()], ids=lambda plan: plan.name
)
def test_a_plan_is_read_as_it_was_written(plan):
    read = from_json(json.loads(json.dumps(to_json(plan))))
    assert read == plan and read.digest == plan.digest
    assert read.digest != ONE.digest


STEP = ("programs", 0, 0, 0)


@pytest.mark.parametrize(
    "path, value, sentence",
    [
        ((), [], "the plan is not a JSON object"),
        (("format",), 2, "its format is 2; give format 1"),
        (("rank",), 2, "it has unknown fields; remove ['rank']"),
        (("ranks",), 0, "ranks is 0; give a whole number from 1 to 2^62"),
        (("chunks",), True, "chunks is True; give a whole number from 1 to 2^62"),
        (("bytes",), 5, "bytes is not a pair of numbers"),
        (("bytes",), [-1, None], "bytes is -1; give a whole number from 0 to 2^62"),
        (("root",), 0, "root is 0, but plans have no root; remove it"),
        (("collective",), "broadcast", "collective is 'broadcast'"),
        (("channels",), None, "it has no list of channels"),
        (("channels", 0), [0], "channel 0 is not [from, to] or [from, to, kind]"),
        (("channels", 0), [0, 1, "fast"], "channel 0 has kind 'fast'; give one of simple, ll"),
        (("programs",), "all", "it has no list of programs"),
        (("programs", 1), {}, "the program of rank 1 is not a list of lanes"),
        (("programs", 1, 0), 7, "lane 0 of rank 1 is not a list of steps"),
        (STEP, "put", "rank 0, lane 0, step 0 is not a JSON object"),
        (("temporary",), 10**400, "temporary is 1000"),
        ((*STEP, "op"), [], "rank 0, lane 0, step 0 has the unknown operation []"),
        ((*STEP, "op"), "get", "rank 0, lane 0, step 0 has the unknown operation 'get'"),
        (STEP, {"op": "wait"}, "(wait) has the fields ['op']; give ['channel', 'op']"),
        ((*STEP, "n"), 0, "rank 0, lane 0, step 0: n is 0; give a whole number from 1 to 2^62"),
        ((*STEP, "src"), 0, "rank 0, lane 0, step 0: src is not a list of places"),
        ((*STEP, "dst"), ["top", 0], """: ['top', 0] is not a place such as ["in", 0]"""),
        ((*STEP, "dst", 1), -1, "a place's chunk is -1; give a whole number from 0 to 2^62"),
    ],
)
def test_what_is_no_plan_is_refused(path, value, sentence):
    data = json.loads(json.dumps(to_json(ONE)))
    at = data
    for key in path[:-1]:
        at = at[key]
    if path:
        at[path[-1]] = value
    with pytest.raises(ValueError) as refusal:
        from_json(data if path else value)
    text = str(refusal.value)
    assert text.startswith("This is not a collective plan: ") and sentence in text and "\n" not in text
