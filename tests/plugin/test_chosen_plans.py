"""The collective plans of a run: all ranks check them together, and a tuner tries the all-to-all plans."""

from types import SimpleNamespace

import plans as written
import pytest

from fairseq_tutel.parallel.groups import Topology
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


def test_a_tuner_tries_only_the_plans_of_all_to_alls():
    found = tuned_algorithms(SimpleNamespace(topology=TOPOLOGY), None)
    assert found == ("linear", "plan:linear_all_to_all", "plan:slow")


def test_an_all_to_all_algorithm_whose_plan_is_missing_is_refused():
    config = SimpleNamespace(a2a_algorithm="plan:ring_all_gather")
    with pytest.raises(
        ValueError, match=r"plan:ring_all_gather, .* give plan:linear_all_to_all or plan:slow"
    ):
        use_plans(None, TOPOLOGY, config)


@pytest.mark.parametrize("own", ["", "mine is wrong"])
def test_if_one_rank_refuses_a_plan_all_ranks_raise_an_error(own, monkeypatch):
    def read(_):
        if own:
            raise ValueError(own)

    monkeypatch.setattr(plans, "plans_of", read)
    monkeypatch.setattr(plans.world, "all_gather_object", lambda error, _: [error, "yours is wrong"])
    with pytest.raises(ValueError, match=own or "yours is wrong"):
        check_together(None)
