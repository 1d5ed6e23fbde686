"""Linear layers in int8: products, the unpacked matrix, and the layers of a module that are replaced."""

import pytest
import torch
from fairseq.modules.multihead_attention import MultiheadAttention
from torch import nn

from fairseq_tutel.inference.quantized_linear import QuantizedLinear, quantize_linear_layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 2, 32), (40, 32)])
def test_a_quantized_layer_multiplies_by_its_unpacked_matrix(shape, bias, dtype):
    torch.manual_seed(1)
    linear = nn.Linear(32, 50, bias, dtype=dtype)
    layer, x = QuantizedLinear(linear), torch.randn(shape, dtype=dtype)
    expected = nn.functional.linear(x.float(), layer.weight.float(), linear.bias.float() if bias else None)
    found = layer(x)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    assert (found.float() - expected).norm() <= 0.01 * expected.norm()
    # The error is at most half a unit of int8 per weight, plus the rounding of bf16.
    largest = linear.weight.float().abs().amax(1, keepdim=True)
    assert ((layer.weight - linear.weight).float().abs() <= largest * (0.5 / 127 + 2**-8)).all()


@torch.no_grad()
def test_attention_works_if_fairseq_calls_its_linear_layers_or_reads_their_weights():
    torch.manual_seed(1)
    attention = MultiheadAttention(64, 4, self_attention=True).eval()
    x = torch.randn(5, 2, 64)
    expected, _ = attention(x, x, x)
    quantize_linear_layers(attention, without=nn.Identity)
    assert isinstance(attention.q_proj, QuantizedLinear)
    for state in (None, {}):  # without a state, fairseq passes the weights to a function of torch
        found, _ = attention(x, x, x, incremental_state=state)
        assert (found - expected).norm() < 0.02 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_unpacked_matrix_gets_the_dtype_of_the_model(dtype):
    """For a model in fp16 (--fp16), fairseq's attention passes the weights to a torch function."""
    attention = MultiheadAttention(64, 4, self_attention=True).eval()
    quantize_linear_layers(attention, without=nn.Identity)
    assert attention.to(dtype).q_proj.weight.dtype == dtype
    assert attention(*[torch.randn(5, 2, 64, dtype=dtype)] * 3)[0].dtype == dtype


def test_some_layers_are_not_replaced():
    model = nn.ModuleDict(
        {"inner": nn.Sequential(nn.Linear(16, 4)), "left": nn.Sequential(nn.Linear(16, 4), nn.ReLU())}
    )
    model["odd"] = nn.Linear(17, 4)
    model["left"].__class__ = type("Left", (nn.Sequential,), {})
    assert quantize_linear_layers(model, without=type(model["left"])) == 1
    assert isinstance(model["inner"][0], QuantizedLinear)
    assert type(model["left"][0]) is nn.Linear is type(model["odd"])
