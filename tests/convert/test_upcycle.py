"""The tests upcycle single layers, and check outputs, initial values and errors of `convert upcycle`."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert.command import Variation
from fairseq_tutel.convert.configs import use_moe_variants
from fairseq_tutel.convert.upcycle import differences, moe_tensors

D, H, E = 8, 24, 6
PLAIN = {"model_dim": D, "hidden_dim": H, "num_experts": E, "activation": "gelu"}
SAME = Variation(seed=3)


def dense_step(layer_norm=False, seed=0):
    """Return the tensors of a dense FFN under the names of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"fc1.weight": (H, D), "fc1.bias": (H,), "fc2.weight": (D, H), "fc2.bias": (D,)}
    if layer_norm:
        shapes |= {"ffn_layernorm.weight": (H,), "ffn_layernorm.bias": (H,)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def dense_output(ffn, x):
    hidden = F.gelu(F.linear(x, ffn["fc1.weight"], ffn["fc1.bias"]))
    if "ffn_layernorm.weight" in ffn:
        hidden = F.layer_norm(hidden, (H,), ffn["ffn_layernorm.weight"], ffn["ffn_layernorm.bias"])
    return F.linear(hidden, ffn["fc2.weight"], ffn["fc2.bias"])


def moe_output(config, tensors, x):
    layer = MoELayer(config, seed=0)
    layer.load_state_dict(tensors)
    return layer.eval()(x)[0]


# With these options of the layer or of `convert upcycle`, the upcycled layer equals the dense FFN.
EQUAL = {
    "top-2": {},
    "as many as there are": {"top_k": E, "normalize_gate": "none"},
    "one expert, no choice": {"num_experts": 1, "top_k": 1},
    "normalised after dropping": {"normalize_gate": "after", "top_k": 3},
    "sigmoid": {"score_function": "sigmoid"},
    "cosine": {"gate_type": "cosine"},
    "two gates": {"gate_type": "linear,cosine", "gate_index": 1},
    "groups of experts": {"expert_groups": 3, "groups_per_token": 2},
    "bias": {"balance_bias": True, "score_function": "sigmoid"},
    "capacity in training": {"capacity_factor": 1.0, "eval_capacity_token_fraction": 0.0},
    "shared": {"shared_experts": 2},
    "residual": {"residual": True},
    "CMR": {"cmr": True},
    "layer norm": {"hidden_layer_norm": True},
    "two parts": {"hidden_dim": H // 2},
    "three parts": {"hidden_dim": H // 3, "top_k": 3},
    "two parts, cosine": {"hidden_dim": H // 2, "gate_type": "cosine"},
    "two parts, groups": {"hidden_dim": H // 2, "num_experts": 12, "expert_groups": 3},
    "two parts, shared": {"hidden_dim": H // 2, "shared_experts": 3},
    "scaled gate": {"gate_scale": 0.01},
}
UNEQUAL = {
    "top-1": {"top_k": 1},
    "top-1, one expert, sigmoid": {"num_experts": 1, "top_k": 1, "score_function": "sigmoid"},
    "top-1, scaled": {"top_k": 1, "routed_scaling_factor": 3.0},
    "top-2, not normalised": {"normalize_gate": "none"},
    "scaled": {"routed_scaling_factor": 2.5},
    "masked assignments": {"eom": 0.2},
    "masked tokens": {"fom": 0.2},
    "prescored": {"prescore": True},
    "experts choose": {"choice": "experts"},
    "capacity": {"eval_capacity_factor": 0.5},
    "capacity as in training": {"capacity_factor": 0.5, "eval_capacity_token_fraction": -1.0},
    "units drawn anew": {"reinitialize": 0.5},
}


def case(options):
    """Return the MoE configuration and the upcycling `Variation` of a test case."""
    names = {item.name for item in dataclasses.fields(Variation)}
    how = dataclasses.replace(SAME, **{k: v for k, v in options.items() if k in names})
    config = MoEConfig(**{**PLAIN, **{k: v for k, v in options.items() if k not in names}})
    return config, how


@pytest.mark.parametrize("name", [*EQUAL, *UNEQUAL])
def test_convert_upcycle_predicts_whether_outputs_equal_those_of_the_dense_ffn(name):
    config, how = case({**EQUAL, **UNEQUAL}[name])
    ffn = dense_step(config.hidden_layer_norm)
    x = torch.randn(40, D, generator=torch.Generator().manual_seed(5))
    expected = dense_output(ffn, x)
    found = moe_output(config, moe_tensors(ffn, config, "decoder.layers.1.fc1", how), x)
    is_same = torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert is_same == (name in EQUAL)
    assert (differences(config, how) == []) == (name in EQUAL)


def test_a_top_1_layer_with_a_small_gate_scale_nearly_equals_the_dense_ffn():
    config, how = case({"top_k": 1, "routed_scaling_factor": float(E), "gate_scale": 0.01})
    ffn, x = dense_step(), F.layer_norm(torch.randn(40, D), (D,))
    found = moe_output(config, moe_tensors(ffn, config, "a", how), x)
    ratio = found / dense_output(ffn, x)
    assert (ratio - 1).abs().max() < 0.03
    assert not torch.allclose(ratio, torch.ones(()), atol=1e-4)


def test_upcycled_gates_are_initialized_as_in_training_and_differ_between_layers():
    config = MoEConfig(**PLAIN, gate_type="linear,cosine", residual=True)
    made = moe_tensors(dense_step(), config, "decoder.layers.1.fc1", SAME)
    drawn = MoELayer(config, seed=3, name="decoder.layers.1.fc1").state_dict()
    assert list(made) == list(drawn)
    for key in drawn:
        assert made[key].shape == drawn[key].shape
        if "gate" in key or "mix" in key:
            assert torch.equal(made[key], drawn[key]), key
    other = moe_tensors(dense_step(), config, "decoder.layers.3.fc1", SAME)
    assert not torch.equal(made["gate.weight"], other["gate.weight"])


def test_experts_that_are_parts_of_one_copied_ffn_have_equal_gate_rows():
    config = MoEConfig(**{**PLAIN, "hidden_dim": H // 3, "top_k": 3, "gate_type": "linear,cosine"})
    made = moe_tensors(dense_step(), config, "a", SAME)
    for rows in (made["gate.weight"], made["other_gates.0.directions"]):
        assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])
        assert torch.equal(rows[3], rows[5]) and not torch.equal(rows[0], rows[3])
    stack = made["experts.fc1_weight"]
    assert torch.equal(stack[4], dense_step()["fc1.weight"][H // 3 : 2 * H // 3])


def test_reinitialize_replaces_a_share_of_the_hidden_units_of_each_expert():
    wide = {"fc1.weight": torch.randn(400, 50) * 0.3 + 1, "fc1.bias": torch.randn(400) * 2}
    wide |= {"fc2.weight": torch.randn(50, 400) * 0.1 - 2, "fc2.bias": torch.randn(50)}
    config = MoEConfig(model_dim=50, hidden_dim=400, num_experts=3, top_k=2)
    made = moe_tensors(wide, config, "a", Variation(reinitialize=0.25))
    changed = []
    for e in range(3):
        rows = (made["experts.fc1_weight"][e] != wide["fc1.weight"]).any(dim=1)
        columns = (made["experts.fc2_weight"][e] != wide["fc2.weight"]).any(dim=0)
        assert rows.sum() == 100 and torch.equal(rows, columns)
        assert torch.equal(rows, made["experts.fc1_bias"][e] != wide["fc1.bias"])
        drawn = made["experts.fc1_weight"][e][rows]
        assert drawn.mean().item() == pytest.approx(1, abs=0.02)
        assert drawn.std().item() == pytest.approx(0.3, rel=0.05)
        assert made["experts.fc2_weight"][e][:, rows].mean().item() == pytest.approx(-2, abs=0.02)
        changed.append(rows)
    assert not torch.equal(changed[0], changed[1])
    assert torch.equal(made["experts.fc2_bias"], wide["fc2.bias"].expand(3, 50))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_convert_upcycle_keeps_the_dtype_of_all_weights(dtype):
    ffn = {key: tensor.to(dtype) for key, tensor in dense_step().items()}
    made = moe_tensors(ffn, MoEConfig(**PLAIN), "a", Variation(reinitialize=0.5))
    assert {t.dtype for key, t in made.items() if "experts" in key} == {dtype}
    assert made["gate.weight"].dtype == torch.float32


REFUSED = {
    "glu": ({"expert_type": "glu"}, r"--moe-expert-type\) is 'glu', but a dense FFN .* remove the option"),
    "no part": ({"hidden_dim": 7}, r"--moe-expert-ffn-dim\) is 7, but the dense FFN is 24 wide"),
    "wider": ({"hidden_dim": 48}, "is 48, but the dense FFN is 24 wide; give a divisor"),
    "experts": (
        {"hidden_dim": 12, "num_experts": 5},
        r"into 2 parts, but with num_experts \(--moe-expert-count\) 5 a token .* multiples of 2",
    ),
    "top-k": ({"hidden_dim": 12, "top_k": 3}, r"top_k \(--moe-top-k\) 3 a token might not choose all"),
    "groups": ({"hidden_dim": 12, "expert_groups": 2}, "expert-groups.* 2 a token might not choose all"),
    "residual": ({"hidden_dim": 12, "residual": True}, "residual.* a token might not choose all"),
    "choice": ({"hidden_dim": 12, "choice": "experts"}, "choice.* a token might not choose all"),
    "norm": ({"hidden_dim": 12, "hidden_layer_norm": True}, "hidden_layer_norm True a token might not"),
    "gate": (
        {"gate_type": "cosine", "gate_scale": 0.5},
        r"--gate-scale is 0.5, which has no effect on gate_type \(--moe-gate-type\) cosine",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_convert_upcycle_raises_an_error_for_options_that_do_not_fit_copied_ffns(name):
    options, sentence = REFUSED[name]
    config, how = case(options)
    with pytest.raises(ValueError, match=sentence):
        moe_tensors(dense_step(config.hidden_layer_norm), config, "a", how)


def test_convert_upcycle_replaces_model_names_by_the_names_of_moe_variants():
    dense = {"model": "transformer_lm", "task": "language_modeling", "optimizer": "adam"}
    for criterion, renamed in (("cross_entropy", "moe_cross_entropy"), ("composite_loss",) * 2):
        names = {**dense, "criterion": criterion}
        saved = SavedModel({"cfg": {part: {"_name": name} for part, name in names.items()}})
        use_moe_variants(saved)
        expected = {**{part: f"moe_{name}" for part, name in dense.items()}, "criterion": renamed}
        assert {part: saved.name(part) for part in names} == expected
