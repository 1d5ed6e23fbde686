"""The plans of a run are read and checked; errors name the file, the reason and the fix."""

import json

import pytest

from fairseq_tutel.plans import files
from fairseq_tutel.plans.format import to_json
from fairseq_tutel.plans.generators import make

PLAN = make("one_phase", "all_reduce", 4)


def write(path, data):
    path.write_text(json.dumps(data))
    return path


def test_plans_of_a_folder_are_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "b.json", to_json(PLAN))
    write(tmp_path / "a.json", to_json(make("ring", "all_gather", 2)))
    found = files.read_run(str(tmp_path))
    assert [(each.name, each.plan.ranks) for each in found] == [("a", 2), ("b", 4)]
    assert found[1].report.depth == 1
    assert files.read_run(str(tmp_path / "b.json")) == found[1:]
    files.refuse_unused(found, [range(4), (0, 2)])


WRONG = to_json(make("one_phase", "all_reduce", 2))
WRONG["programs"][1][0] = [step for step in WRONG["programs"][1][0] if step["op"] != "wait"]


@pytest.mark.parametrize(
    "data, sentence",
    [
        ("{", r"x\.json cannot be read as a collective plan \("),
        ("[" * 100_000, r"x\.json cannot be read as a collective plan \("),
        (json.dumps({"format": 1}), r"x\.json: This is not a collective plan: "),
        (json.dumps(WRONG), r"x\.json: Plan 'one_phase all_reduce' .*channel"),
    ],
)
def test_the_error_for_an_invalid_plan_names_the_file(data, sentence, tmp_path):
    (tmp_path / "x.json").write_text(data)
    for place in (tmp_path / "x.json", tmp_path):
        with pytest.raises(ValueError, match=sentence) as error:
            files.read_run(str(place))
        assert str(error.value).startswith("--moe-collective-plans")


@pytest.mark.parametrize("name", ("", "none.json"))
def test_a_path_without_plans_raises_an_error(name, tmp_path):
    with pytest.raises(ValueError, match=r"--moe-collective-plans.*(which has no plan|No such file)"):
        files.read_run(str(tmp_path / name))


def test_a_plan_that_no_group_can_run_raises_an_error():
    placed = files.PlacedPlan("x", PLAN, files.check(PLAN))
    with pytest.raises(ValueError, match="plan x is for 4 ranks, but the groups of this run have 2 ranks"):
        files.refuse_unused([placed], [range(2), (0, 2)])
