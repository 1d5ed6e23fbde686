"""The tests compare outputs and gradients of experts with a loop over tokens."""

import dataclasses

import oracle
import pytest
import torch
from compare import TOLERANCE, close, same_function
from normal import normal
from torch import Tensor

from fairseq_tutel import MoEConfig
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.config import ACTIVATIONS
from fairseq_tutel.moe.experts import Experts, grouped_linear

CONFIG = MoEConfig(model_dim=6, hidden_dim=7, num_experts=4, top_k=1)
COUNTS = (3, 0, 5, 1)


def build(dtype: torch.dtype = torch.float64, **options) -> Experts:
    experts = Experts(dataclasses.replace(CONFIG, **options))
    experts.reset_parameters(seed=1, name="")
    if experts.hidden_layer_norm is not None:  # A layer norm whose weights are all 1 hides errors.
        experts.hidden_layer_norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
    return experts.to(dtype)


def rows(num_rows: int = sum(COUNTS), dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(num_rows, CONFIG.model_dim, seed=2, dtype=dtype).requires_grad_()


def grouped(counts) -> Groups:
    return Groups.of_host(counts, torch.device("cpu"))


def by_loop(experts: Experts, rows_RD: Tensor, counts=COUNTS) -> Tensor:
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    outputs = [oracle.one_expert(experts, e, row) for e, row in zip(owners, rows_RD, strict=True)]
    return torch.stack(outputs) if outputs else rows_RD


def check(experts: Experts, rows_RD: Tensor, counts=COUNTS) -> None:
    same_function(
        lambda: experts(rows_RD, grouped(counts)),
        lambda: by_loop(experts, rows_RD, counts),
        {"rows": rows_RD, **dict(experts.named_parameters())},
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_its_formula(activation):
    check(build(activation=activation), rows())


@pytest.mark.parametrize("expert_type", ("ffn", "glu"))
@pytest.mark.parametrize("expert_bias", (True, False))
@pytest.mark.parametrize("hidden_layer_norm", (True, False))
def test_every_expert_type_equals_a_loop_over_tokens(expert_type, expert_bias, hidden_layer_norm):
    experts = build(expert_type=expert_type, expert_bias=expert_bias, hidden_layer_norm=hidden_layer_norm)
    names = {"fc1_weight", "fc2_weight"} | ({"fc3_weight"} if expert_type == "glu" else set())
    names |= {name.replace("weight", "bias") for name in names} if expert_bias else set()
    assert set(experts.expert_parameters()) == names
    check(experts, rows())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("expert_type", ("ffn", "glu"))
def test_experts_equal_a_loop_over_tokens_in_every_dtype(dtype, expert_type):
    check(build(dtype, expert_type=expert_type, activation="gelu"), rows(dtype=dtype))


@pytest.mark.parametrize("expert_bias", (True, False))
def test_experts_without_input_rows_return_no_rows_and_zero_gradients(expert_bias):
    experts, rows_RD = build(expert_bias=expert_bias), rows(0)
    out = experts(rows_RD, grouped((0, 0, 0, 0)))
    assert out.shape == (0, CONFIG.model_dim)
    out.sum().backward()
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("expert_type", ("ffn", "glu"))
@pytest.mark.parametrize("hidden_layer_norm", (True, False))
def test_experts_under_autocast_compute_in_bf16_and_keep_fp32_gradients(expert_type, hidden_layer_norm):
    options = {"expert_type": expert_type, "hidden_layer_norm": hidden_layer_norm}
    experts, rows_RD = build(torch.float32, **options), rows(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(rows_RD, grouped(COUNTS))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    wide = build(torch.float64, **options)
    wide_rows = rows()
    expected = by_loop(wide, wide_rows)
    expected.sum().backward()
    close(out, expected, "output")
    close(rows_RD.grad, wide_rows.grad, "gradient of rows", 0.1)
    for (name, parameter), exact in zip(experts.named_parameters(), wide.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        close(parameter.grad, exact.grad, f"gradient of {name}", 0.1)


def test_activation_dropout_zeroes_and_rescales_the_hidden_layer_in_training_only():
    # If fc2 is the identity, the output of an expert is its hidden layer.
    options = {"hidden_dim": 6, "expert_bias": False, "activation": "linear"}
    plain, dropped = build(**options), build(activation_dropout=0.4, **options)
    for experts in (plain, dropped):
        experts.fc2_weight.data.copy_(torch.eye(6).expand(4, 6, 6))
    rows_RD = rows()
    hidden = plain(rows_RD, grouped(COUNTS))
    torch.manual_seed(0)
    out = dropped(rows_RD, grouped(COUNTS))
    lost = out == 0
    assert 0.2 < float(lost.double().mean()) < 0.6
    torch.testing.assert_close(out[~lost], hidden[~lost] / 0.6)
    dropped.eval()
    assert torch.equal(dropped(rows_RD, grouped(COUNTS)), hidden)


@pytest.mark.parametrize("with_bias", (True, False))
def test_grouped_linear_gradients_equal_finite_differences(with_bias):
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    inputs = (normal(6, 3), normal(3, 2, 3), normal(3, 2) if with_bias else None)
    assert torch.autograd.gradcheck(lambda x, w, b: grouped_linear(x, grouped((4, 0, 2)), w, b), inputs)
