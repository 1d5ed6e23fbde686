"""The tests' own net: memory that the package allocates and does not fill is seen."""

import types

import torch

SOURCE = """
import torch
def allocate(like):
    return torch.empty(3), torch.empty_like(like), like.new_empty(3)
"""


def allocate(module_name: str) -> tuple[torch.Tensor, ...]:
    module = types.ModuleType(module_name)
    exec(SOURCE, module.__dict__)
    return module.allocate(torch.zeros(3))


def test_what_the_package_allocates_is_nan():
    assert all(tensor.isnan().all() for tensor in allocate("fairseq_tutel.somewhere"))


def test_what_others_allocate_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "fill_", None)
    allocate("elsewhere")


def test_devices_still_redirect_allocations():
    with torch.device("meta"):
        assert torch.empty(2).is_meta
