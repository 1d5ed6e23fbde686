"""Fused experts read unsorted rows through an index, and other experts sort the rows first."""

import pytest
import torch
from torch import Tensor

from fairseq_tutel import MoEConfig
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.experts import Experts

OPTIONS = ({}, {"expert_type": "glu"}, {"hidden_layer_norm": True}, {"recompute_experts": True})


def build(options: dict, dtype: torch.dtype = torch.float64) -> Experts:
    experts = Experts(MoEConfig(6, 5, 4, **options))
    experts.reset_parameters(1, "layer")
    return experts.to(dtype)


def run(experts: Experts, rows: Tensor, counts: tuple, order: Tensor, sorts: bool) -> list[Tensor]:
    """Return the outputs and gradients of experts; if `sorts` is true, sort the rows by expert first."""
    x = rows.clone().requires_grad_()
    groups, inverse = Groups.of_host(counts, rows.device), order.argsort()
    y = experts(x[order], groups)[inverse] if sorts else experts.run_unsorted(x, groups, order, inverse)
    generator = torch.Generator().manual_seed(3)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    leaves = [x, *experts.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy, materialize_grads=True)]


@pytest.mark.parametrize("counts", ((3, 0, 5, 1), (0, 0, 0, 0), (1, 0, 0, 0)), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_unsorted_rows_give_the_outputs_and_gradients_of_sorted_rows(options, counts):
    experts = build(options)
    assert experts.can_fuse is not options.get("hidden_layer_norm", False)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(sum(counts), 6, generator=generator, dtype=torch.float64)
    order = torch.randperm(sum(counts), generator=generator)
    pairs = zip(*(run(experts, rows, counts, order, sorts) for sorts in (False, True)), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
