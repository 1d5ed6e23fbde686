"""The tests compare gates with their formulas and check that only training adds noise."""

import pytest
import torch
from normal import normal

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.gates import gate_input, noisy_logits

SIZES = {"model_dim": 6, "hidden_dim": 5, "num_experts": 4, "top_k": 2}


def layer(**options):
    return MoELayer(MoEConfig(**SIZES, gate_projection_dim=3, **options), seed=1).double()


def x(num_tokens=7):
    return normal(num_tokens, 6, seed=0)


def test_the_biased_gate_equals_its_formula():
    gate = layer(gate_type="biased").gate
    assert torch.equal(gate.bias, torch.zeros(4, dtype=torch.float64))
    with torch.no_grad():
        gate.bias.copy_(normal(4, seed=3))
    for t, x_D in enumerate(x()):
        for e, row_D in enumerate(gate.weight):
            assert float(gate(x())[t, e]) == pytest.approx(float(row_D @ x_D + gate.bias[e]))


def test_the_cosine_gate_equals_its_formula():
    gate = layer(gate_type="cosine").gate
    for t, x_D in enumerate(x()):
        p = gate.projection_weight @ x_D + gate.projection_bias
        for e, direction in enumerate(gate.directions):
            cosine = p @ direction / (p.norm() * direction.norm())
            assert float(gate(x())[t, e]) == pytest.approx(2 * float(cosine))  # the temperature is 0.5


@pytest.mark.parametrize("kind", ["linear", "biased", "cosine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gate_logits_are_fp32_unless_gate_fp32_is_off(kind, dtype):
    for fp32, expected in ((True, torch.float32), (False, dtype)):
        config = MoEConfig(**SIZES, gate_type=kind, gate_fp32=fp32)
        gate = MoELayer(config, seed=1).to(dtype).gate
        assert gate(x().to(dtype)).dtype == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        config = MoEConfig(**SIZES, gate_type=kind)
        assert MoELayer(config, seed=1).gate(x().float()).dtype == torch.float32


def test_jitter_multiplies_the_gate_input_by_numbers_near_one_only_in_training():
    config = MoEConfig(**SIZES, input_jitter=0.1)
    ones = torch.ones(2000, 6)
    assert gate_input(ones, config, training=False) is ones
    jittered = gate_input(ones, config, training=True)
    assert 0.9 <= float(jittered.min()) < 0.91
    assert 1.09 < float(jittered.max()) <= 1.1


def test_dropout_of_the_gate_input_keeps_the_mean_of_the_input():
    config = MoEConfig(**SIZES, input_dropout=0.25)
    dropped = gate_input(torch.ones(4000, 6), config, training=True)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert float(dropped.mean()) == pytest.approx(1, abs=0.03)


def test_gate_noise_is_divided_by_the_number_of_experts():
    config = MoEConfig(**SIZES, gate_noise=2.0)
    noisy = noisy_logits(torch.zeros(20_000, 4), config, training=True)
    assert float(noisy.std()) == pytest.approx(2 / 4, rel=0.02)
    assert float(noisy.mean()) == pytest.approx(0, abs=0.01)
    zeros = torch.zeros(3, 4)
    assert noisy_logits(zeros, config, training=False) is zeros


NOISY = {"input_jitter": 0.3, "input_dropout": 0.2, "gate_noise": 2.0}


def test_noise_affects_only_the_gate_and_only_in_training():
    noisy, quiet = layer(**NOISY), layer()
    state = torch.get_rng_state()
    assert torch.equal(noisy.eval()(x())[0], quiet.eval()(x())[0])
    assert torch.equal(torch.get_rng_state(), state)
    # All experts have equal weights, so y depends on the experts' input and not on the gate's input.
    config = {**SIZES, "top_k": 4, "num_experts": 4}
    one = MoELayer(MoEConfig(**config, **NOISY), seed=1).double()
    with torch.no_grad():
        for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"):
            parameter = getattr(one.experts, name)
            parameter.copy_(parameter[:1].expand_as(parameter))
    torch.testing.assert_close(one.train()(x())[0], one.eval()(x())[0])
