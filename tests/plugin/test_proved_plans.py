"""Plans are checked on one rank of a host; the other ranks skip plans with the same digest."""

import json
from types import SimpleNamespace

import pytest

from fairseq_tutel.plans import checker, placed
from fairseq_tutel.plans.format import to_json
from fairseq_tutel.plans.generators import make
from fairseq_tutel.plugin import plans
from fairseq_tutel.plugin.run_state import RUN


def test_the_first_rank_of_a_host_checks_for_the_others(monkeypatch, tmp_path):
    plan = make("one_phase", "all_gather", 2)
    (tmp_path / "x.json").write_text(json.dumps(to_json(plan)))
    given = SimpleNamespace(moe_collective_plans=str(tmp_path), moe_local_size=2)
    monkeypatch.setattr(plans, "read", lambda *_: given)
    checked = []
    monkeypatch.setattr(checker, "check_races", lambda *_: checked.append(1))
    for rank, problem in ((0, ""), (1, ""), (1, "x.json is wrong")):
        monkeypatch.setattr(plans.dist, "get_rank", lambda rank=rank: rank)

        def told(own, _, problem=problem):
            other = (problem, frozenset({plan.digest}))
            return [other, own] if isinstance(own, tuple) else [own, own]

        monkeypatch.setattr(plans.world, "all_gather_object", told)
        checked.clear()
        if problem:
            with pytest.raises(ValueError, match=problem):
                plans.prove_once_a_host(None)
            continue
        plans.prove_once_a_host(None)
        assert plans.plans_of(None)[0].plan == plan
        assert len(checked) == (rank == 0)
    RUN.plans.clear()


def refused(path):
    """Return this rank's error for a wrong plan, and how many plans it has checked."""
    checks, check = [], placed.check
    given = SimpleNamespace(moe_collective_plans=path, moe_local_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placed, "check", lambda *each: checks.append(1) or check(*each))
        with pytest.raises(ValueError) as error:
            plans.prove_once_a_host(given)
    return str(error.value), len(checks)


def test_a_wrong_plan_ends_all_ranks_with_the_sentence_of_the_one_that_checked(ranks, tmp_path):
    plan = to_json(make("one_phase", "all_gather", 2))
    # Rank 1 never sends its chunk to rank 0.
    lane = plan["programs"][1][0]
    lane.remove(next(step for step in lane if step["op"] == "put"))
    (tmp_path / "x.json").write_text(json.dumps(plan))
    (first, checked), (second, unchecked) = ranks(2).run(refused, str(tmp_path))
    assert first == second and first.startswith(f"--moe-collective-plans: {tmp_path}")
    assert (checked, unchecked) == (1, 0)
