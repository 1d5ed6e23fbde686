"""The plans of a run: a common check, and the all-to-alls that a tuner tries."""

import json
from types import SimpleNamespace

import plans as written
import pytest
import torch.distributed as dist

from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.machine import PRESETS
from fairseq_tutel.plans.format import to_json
from fairseq_tutel.plans.generators import make
from fairseq_tutel.plugin import plans
from fairseq_tutel.plugin.plans import check_together, tuned_algorithms, use_plans

TOPOLOGY = Topology(world_size=4, expert_parallel_size=4, expert_group="four")


@pytest.fixture(autouse=True)
def given(monkeypatch):
    """Give a run three plans for four ranks, one of them slow."""
    quick = written.placed(make("linear", "all_to_all", 4), make("ring", "all_gather", 4))
    slow = quick[0]._replace(name="slow", report=SimpleNamespace(loads=[{(0, 1): 1000}]))
    monkeypatch.setattr(plans, "plans_of", lambda _: (*quick, slow))
    monkeypatch.setattr(plans.dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3])


def test_a_tuner_tries_plans_that_are_not_foretold_to_be_slow(caplog):
    layer = SimpleNamespace(topology=TOPOLOGY)
    with caplog.at_level("INFO"):
        found = tuned_algorithms(layer, None, PRESETS["a100"], 1e6)
    assert found == ("linear", "plan:linear_all_to_all")
    assert "predicted from the hardware profile A100, are not tried: plan:slow" in caplog.text


def test_an_all_to_all_that_nobody_asked_for_is_named(monkeypatch, caplog):
    monkeypatch.setattr(plans, "read", lambda *_: SimpleNamespace(moe_local_size=0, moe_micro_batches=0))
    monkeypatch.setattr(plans.collectives, "use", lambda *_: None)
    config = SimpleNamespace(a2a_algorithm="linear", adaptive="", adaptive_r=1)
    with caplog.at_level("INFO"):
        use_plans(None, TOPOLOGY, config)
    flag = "--moe-a2a-algorithm plan:linear_all_to_all or plan:slow"
    assert f"no collective plan is used to exchange rows; to use one, give {flag}" in caplog.text


def test_an_all_to_all_without_its_plan_is_refused():
    config = SimpleNamespace(a2a_algorithm="plan:ring_all_gather")
    with pytest.raises(ValueError) as error:
        use_plans(None, TOPOLOGY, config)
    assert str(error.value) == (
        "--moe-a2a-algorithm is plan:ring_all_gather, but --moe-collective-plans has no "
        "ring_all_gather.json with an all_to_all for the 4 ranks of an EP group; give "
        "plan:linear_all_to_all or plan:slow, or give linear."
    )


def test_a_run_with_micro_batches_skips_plans_that_do_not_fit(monkeypatch, caplog):
    used = []
    monkeypatch.setattr(plans, "PlanBackend", lambda given, _: [each.name for each in given])
    monkeypatch.setattr(plans.collectives, "use", used.append)
    options = SimpleNamespace(moe_micro_batches=8)
    config = SimpleNamespace(a2a_algorithm="plan:slow", adaptive="", adaptive_r=1)
    caplog.set_level("INFO")
    assert use_plans(options, TOPOLOGY, config) == "plan:slow"
    assert not caplog.records
    monkeypatch.setattr(plans.dist, "get_process_group_ranks", lambda _: [0, 1])
    pairs = Topology(world_size=4, expert_parallel_size=2, expert_group="pair")
    assert use_plans(options, pairs, config) == "linear"
    assert used == [["linear_all_to_all", "ring_all_gather", "slow"]] * 2
    assert "is plan:slow, but no such plan fits the 2 ranks of an EP group: using linear" in caplog.text
    caplog.clear()
    pair = Topology(world_size=2, expert_parallel_size=2, expert_group="pair")
    assert use_plans(options, pair, config) == "linear"
    assert "fit no group of ranks are not used: linear_all_to_all, ring_all_gather, slow" in caplog.text
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
