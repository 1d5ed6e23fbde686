"""The plans of a run: a common check, and the all-to-alls that a tuner tries."""

import json
from types import SimpleNamespace

import plans as written
import pytest
import torch.distributed as dist

from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plans.format import to_json
from fairseq_tutel.plans.generators import make
from fairseq_tutel.plugin import plans
from fairseq_tutel.plugin.plans import check_together, tuned_algorithms, use_plans

TOPOLOGY = Topology(world_size=4, expert_parallel_size=4, expert_group="four")


@pytest.fixture(autouse=True)
def given(monkeypatch):
    """Give a run three plans for four ranks, one of them slow."""
    quick = written.placed(make("linear", "all_to_all", 4), make("ring", "all_gather", 4))
    slow = quick[0]._replace(name="slow", report=None)
    monkeypatch.setattr(plans, "plans_of", lambda _: (*quick, slow))
    monkeypatch.setattr(plans.dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3])


def test_a_tuner_tries_the_all_to_alls_among_the_plans():
    found = tuned_algorithms(SimpleNamespace(topology=TOPOLOGY), None)
    assert found == ("linear", "plan:linear_all_to_all", "plan:slow")


def test_an_all_to_all_without_its_plan_is_refused():
    config = SimpleNamespace(a2a_algorithm="plan:ring_all_gather")
    with pytest.raises(
        ValueError, match=r"plan:ring_all_gather, .* give plan:linear_all_to_all or plan:slow"
    ):
        use_plans(None, TOPOLOGY, config)


def test_a_run_with_micro_batches_skips_plans_that_do_not_fit(monkeypatch):
    used = []
    monkeypatch.setattr(plans, "PlanBackend", lambda given, _: [each.name for each in given])
    monkeypatch.setattr(plans.collectives, "use", used.append)
    options = SimpleNamespace(moe_micro_batches=8)
    config = SimpleNamespace(a2a_algorithm="plan:slow")
    assert use_plans(options, TOPOLOGY, config) == "plan:slow"
    monkeypatch.setattr(plans.dist, "get_process_group_ranks", lambda _: [0, 1])
    pairs = Topology(world_size=4, expert_parallel_size=2, expert_group="pair")
    assert use_plans(options, pairs, config) == "linear"
    assert used == [["linear_all_to_all", "ring_all_gather", "slow"]] * 2
    pair = Topology(world_size=2, expert_parallel_size=2, expert_group="pair")
    assert use_plans(options, pair, config) == "linear"
    assert used[-1] is None


def refused(path):
    """Return this rank's error for plans of which one rank has none."""
    given = SimpleNamespace(moe_collective_plans=path if dist.get_rank() else "", moe_local_size=2)
    with pytest.raises(ValueError) as error:
        check_together(given)
    return str(error.value)


def test_a_wrong_plan_ends_all_ranks_with_one_sentence(ranks, tmp_path):
    plan = to_json(make("one_phase", "all_gather", 2))
    # Rank 1 never sends its chunk to rank 0.
    lane = plan["programs"][1][0]
    lane.remove(next(step for step in lane if step["op"] == "put"))
    (tmp_path / "x.json").write_text(json.dumps(plan))
    first, second = ranks(2).run(refused, str(tmp_path))
    assert first == second and first.startswith(f"--moe-collective-plans: {tmp_path}")
