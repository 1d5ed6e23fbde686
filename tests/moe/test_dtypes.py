"""Different dtypes of x, of the weights and of torch's default."""

import pytest
import torch
from compare import close
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.build import draw_linear
from fairseq_tutel.moe.choice import sampled_choices
from fairseq_tutel.moe.slots import at_random
from fairseq_tutel.parallel.gradients import square_norm

SIZES = {"model_dim": 8, "hidden_dim": 16, "num_experts": 4, "activation": "gelu"}
PARTS = (
    {},
    {"activation_dropout": 0.3},
    {"hidden_layer_norm": True},
    {"shared_experts": 1},
    {"residual": True},
    {"gate_fp32": False},
    {"gate_fp32": False, "gate_type": "cosine", "gate_projection_dim": 3},
    {"expert_type": "custom_parts.DeepExpert"},
    {"prescore": True, "expert_type": "glu"},
)


def tokens(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(7, 8, generator=generator).to(torch.bfloat16).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("options", PARTS, ids=str)
def test_x_can_have_another_dtype_than_the_weights(options, dtype):
    layer = MoELayer(MoEConfig(**SIZES, **options), seed=1).bfloat16()
    same, other = tokens(torch.bfloat16), tokens(dtype)
    outputs = []
    for x in (same, other):
        torch.manual_seed(5)
        y, output = layer(x)
        assert y.dtype == torch.bfloat16
        (y.double().square().sum() + output.balance_loss).backward()
        outputs.append(y)
    close(outputs[1], outputs[0], "y")
    assert other.grad.dtype == dtype
    close(other.grad, same.grad, "gradient of x", 0.1)


@pytest.fixture
def bf16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_random_numbers_and_norms_are_fp32_for_any_default_dtype(bf16_by_default):
    def drawn() -> list[Tensor]:
        torch.manual_seed(1)
        requested_TK = sampled_choices(torch.full((2000, 2), 0.25))
        ids_TK, position_T = torch.zeros(2000, 1, dtype=torch.int64), torch.arange(2000)
        order_N = at_random(torch.ones(2000, 1), ids_TK, position_T, True)
        weight = torch.empty(50, 50, dtype=torch.float32)
        draw_linear(weight, 50, "weight", 0.0, torch.Generator().manual_seed(2))
        norm = square_norm([], torch.device("cpu"))
        return [requested_TK, order_N, weight, norm]

    found = drawn()
    torch.set_default_dtype(torch.float32)
    for got, expected in zip(found, drawn(), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
