"""The choice of a plan for a collective, by dtype and number of bytes."""

from types import SimpleNamespace

import pytest
import torch

from fairseq_tutel.plans.executors import backend


@pytest.fixture
def plans(monkeypatch):
    """Return a backend with one plan for 8 to 16 bytes and another plan for 32 bytes or more."""
    bounds = {"small": (8, 16), "large": (32, None)}
    found = backend.PlanBackend(
        SimpleNamespace(name=name, plan=SimpleNamespace(min_bytes=least, max_bytes=most))
        for name, (least, most) in bounds.items()
    )
    monkeypatch.setattr(found, "_fitting", lambda *_: found.plans)
    monkeypatch.setattr(found, "_program", lambda placed, *_: placed.name)
    return found


@pytest.mark.parametrize(
    ("elements", "name"),
    [(7, None), (8, "small"), (16, "small"), (17, None), (31, None), (32, "large"), (99, "large")],
)
def test_a_plan_runs_only_for_sizes_in_its_range(plans, elements, name):
    own = torch.zeros(elements, dtype=torch.uint8)
    assert plans.chosen("all_gather", own, "a test", None) == name


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64, torch.float32])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_a_plan_is_not_used_for_sums_of_unsupported_dtypes(plans, collective, dtype):
    own = torch.zeros(16 // dtype.itemsize, dtype=dtype)
    sums = collective == "all_reduce" and dtype != torch.float32
    assert plans.chosen(collective, own, "a test", None) == (None if sums else "small")
