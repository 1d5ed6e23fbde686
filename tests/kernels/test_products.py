"""The tests compare the matrix products that are fast for few rows on a CPU with plain torch products."""

import pytest
import torch

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.kernels import ffn_by_expert, products


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


@pytest.mark.parametrize("rows", (1, 2, 16, 17))
@pytest.mark.parametrize("bias", (True, False))
def test_linear_swaps_its_operands_for_few_rows_and_a_large_weight(monkeypatch, rows, bias):
    x, weight, place = normal(rows, 256), normal(1024, 256), torch.full((rows, 1024), torch.nan)
    seen, of_few = [], products.linear_of_few
    monkeypatch.setattr(products, "linear_of_few", lambda *a: seen.append(1) or of_few(*a))
    b = normal(1024) if bias else None
    assert products.linear(x, weight, b, place) is place
    torch.testing.assert_close(place, torch.nn.functional.linear(x, weight, b), rtol=1e-5, atol=1e-4)
    assert torch.equal(place, products.linear(x, weight, b))
    assert len(seen) == (2 if rows <= 16 else 0)
    # This weight fits into a core's cache, so the operands are not swapped.
    products.linear(x, weight[:1023], None)
    assert len(seen) == (2 if rows <= 16 else 0)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("rows", (1, 2, 7, products.MOST_IN_PARTS, products.MOST_IN_PARTS + 1))
def test_weight_gradients_in_blocks_are_bit_identical_to_one_product(rows, dtype):
    dout, x = (normal(rows, 1100).to(dtype), normal(rows, 256).to(dtype))
    dweight, dbias = torch.full((1100, 256), torch.nan, dtype=dtype), torch.zeros(1100, dtype=dtype)
    products.weight_grad(dout, x, dweight, dbias)
    if rows == 2 and dtype == torch.float32:  # The sum of two outer products may be rounded differently.
        torch.testing.assert_close(dweight, torch.mm(dout.t(), x))
    else:
        assert torch.equal(dweight, torch.mm(dout.t(), x))
    torch.testing.assert_close(dbias, dout.sum(dim=0))


def test_a_block_of_several_experts_has_at_most_the_given_number_of_rows():
    found = ffn_by_expert.blocks_of((0, 2, 1, 0, 2, 9, 0, 1, 0), 4)
    assert [(b.rows, b.experts, b.counts) for b in found] == [
        (slice(0, 3), (1, 2), (2, 1)),
        (slice(3, 5), (4,), (2,)),
        (slice(5, 14), (5,), (9,)),
        (slice(14, 15), (7,), (1,)),
    ]
    assert ffn_by_expert.blocks_of((0, 0), 4) == []


@pytest.mark.parametrize("options", ({}, {"expert_type": "glu", "activation": "gelu"}), ids=str)
def test_blocks_of_experts_do_not_change_the_bits_of_results(monkeypatch, options):
    config = MoEConfig(model_dim=16, hidden_dim=32, num_experts=8, top_k=2, **options)
    layer = MoELayer(config, seed=1)
    x = normal(9, 16)[:, :].requires_grad_()

    def results() -> list[torch.Tensor]:
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    together = results()
    monkeypatch.setattr(ffn_by_expert, "BLOCK_BYTES", 0)
    for one, other in zip(results(), together, strict=True):
        assert torch.equal(one, other)
