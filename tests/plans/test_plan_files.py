"""The plans of a run are read and checked, or refused in a sentence with file, reason and fix."""

import dataclasses
import json

import pytest

from fairseq_tutel.plans import files, network
from fairseq_tutel.plans.format import to_json
from fairseq_tutel.plans.generators import make

BOXES = network.find("boxes:2x2:10:1")
PLAN = dataclasses.replace(make("one_phase", "all_reduce", 4), network=BOXES.digest)


def write(path, data):
    path.write_text(json.dumps(data))
    return path


def test_a_folder_has_plans_in_the_order_of_names_and_their_network(tmp_path):
    write(tmp_path / "b.json", to_json(PLAN))
    write(tmp_path / "a.json", to_json(make("ring", "all_gather", 2)))
    write(tmp_path / "network.json", network.to_json(BOXES))
    found = files.read_run(str(tmp_path))
    assert [(each.name, each.plan.ranks, each.hosts) for each in found] == [
        ("a", 2, None),
        ("b", 4, (2, 2)),
    ]
    assert found[1].report.depth == 1
    assert files.read_run(str(tmp_path / "b.json")) == found[1:]
    groups = [range(4), (0, 2), (0, 1)]
    for local in (0, 2):  # ranks of a host, if known
        files.refuse_unused(found, groups, local)
        assert found[1].fits(range(4), local) and not found[1].fits((0, 1), local)


WRONG = to_json(make("one_phase", "all_reduce", 2))
WRONG["programs"][1][0] = [step for step in WRONG["programs"][1][0] if step["op"] != "wait"]


@pytest.mark.parametrize(
    "data, sentence",
    [
        ("{", r"x\.json cannot be read as a collective plan \("),
        ("[" * 100_000, r"x\.json cannot be read as a collective plan \("),
        (json.dumps({"format": 1}), r"x\.json: This is not a collective plan: KeyError"),
        (json.dumps(WRONG), r"x\.json: Plan 'one_phase all_reduce' .*channel"),
        (json.dumps(network.to_json(BOXES)), r"x\.json: This is not a collective plan: "),
        (
            json.dumps(to_json(PLAN)),
            r"x\.json: the plan is for the network with the digest \w+, but no network file in its folder",
        ),
    ],
)
def test_what_is_no_plan_is_refused_with_its_file(data, sentence, tmp_path):
    (tmp_path / "x.json").write_text(data)
    for place in (tmp_path / "x.json", tmp_path):
        if "gpus" in data and place == tmp_path:  # a folder with a network's file alone
            continue
        with pytest.raises(ValueError, match=sentence) as error:
            files.read_run(str(place))
        said = str(error.value)
        assert said.startswith("--moe-collective-plans") and said.endswith(".")


@pytest.mark.parametrize("name", ("", "none.json"))
def test_where_no_plan_lies_there_is_a_sentence(name, tmp_path):
    with pytest.raises(ValueError, match=r"--moe-collective-plans.*(which has no plan|No such file)"):
        files.read_run(str(tmp_path / name))


@pytest.mark.parametrize(
    "plan, hosts, sentence",
    [
        (
            make("ring", "all_gather", 3),
            None,
            "plan x is for 3 ranks, but the groups of this run have 2 and 4 ranks; make",
        ),
        (PLAN, (2, 2), r"plan x is for 4 ranks \(2\+2 on its hosts\), but .* with 4 on a host; make"),
    ],
)
def test_a_plan_that_no_group_can_run_is_refused(plan, hosts, sentence):
    placed = files.PlacedPlan("x", plan, files.check(plan), hosts)
    with pytest.raises(ValueError, match=f"--moe-collective-plans: {sentence}"):
        files.refuse_unused([placed], [range(4), (0, 2)], 4)
