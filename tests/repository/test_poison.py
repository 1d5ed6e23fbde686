"""In tests, `torch.empty` returns NaN to code of this package, so that tests detect missing writes."""

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


def test_uninitialized_tensors_of_the_package_are_nan_in_tests():
    assert all(tensor.isnan().all() for tensor in allocate("fairseq_tutel.somewhere"))


def test_uninitialized_tensors_of_other_packages_are_not_filled_with_nan(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "fill_", None)
    allocate("elsewhere")


def test_torch_device_sets_the_device_of_uninitialized_tensors():
    with torch.device("meta"):
        assert torch.empty(2).is_meta
