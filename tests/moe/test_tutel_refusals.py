"""`fairseq_tutel.moe_layer` refuses what cannot work, in one sentence that names it."""

import pytest
import torch.nn.functional as F
from tutel_case import FFN, TOP, D, T, build, tokens

import fairseq_tutel as ft

BAD = [
    ({"gate_type": {"type": "top", "kk": 2}}, "has the unknown key 'kk'; choose from type, k, cap"),
    ({"gate_type": {"type": "topp"}}, "with a type of top, cosine_top or custom"),
    ({"gate_type": "Top2Gate"}, "gate_type is 'Top2Gate'; give a dict"),
    ({"gate_type": []}, "gate_type is an empty list"),
    ({"gate_type": {"type": "top", "k": 0}}, "gate_type's k is 0; give a whole number, at least 1"),
    ({"gate_type": {"type": "top", "k": "2"}}, "gate_type's k is '2'; give a whole number"),
    ({"gate_type": {"type": "top", "capacity_factor": "1"}}, "capacity_factor is '1'; give a finite"),
    ({"gate_type": {"type": "top", "gate_noise": -1}}, "gate_noise is -1; give a finite number, at"),
    ({"gate_type": {"type": "top", "fp32_gate": "yes"}}, "fp32_gate is 'yes'; give True or False"),
    ({"gate_type": {"type": "cosine_top", "init_t": 0}}, "gate_type's init_t is 0; give a number of"),
    ({"gate_type": {"type": "custom"}}, "gate_type's module is None; give the class"),
    ({"gate_type": {"type": "custom", "module": dict}}, "gate_type's module built dict; give the class"),
    ({"model_dim": 0}, "model_dim is 0; give a whole number"),
    ({"experts": {"type": "fnn"}}, "with a type of ffn, llama_ffn or custom"),
    ({"experts": {"type": "ffn"}}, "experts has no hidden_size_per_expert; give the hidden"),
    ({"experts": {**FFN, "dropout": 1}}, "experts 'ffn' has the unknown key 'dropout'; choose from"),
    ({"experts": {**FFN, "count_per_node": 1}}, "has both num_experts_per_device and count_per_node"),
    ({"experts": {**FFN, "hidden_size_per_expert": 0}}, "experts' hidden_size_per_expert is 0; give"),
    ({"experts": {**FFN, "activation_fn": "relu"}}, "activation_fn is 'relu'; give a function"),
    ({"experts": {**FFN, "output_dim": 0}}, "experts' output_dim is 0; give a whole number"),
    (
        {"experts": {**FFN, "activation_fn": F.relu, "activation_fn_with_self": F.relu}},
        "both activation_fn and activation_fn_with_self; give one",
    ),
    ({"experts": {"type": "custom"}}, "experts' module is None; give the class of the experts"),
    ({"experts": {"type": "custom", "module": dict}}, "experts' module built dict; give the class"),
    ({"experts": {**FFN, "num_experts_per_device": 0}}, "num_experts_per_device is 0; give n experts"),
    ({"experts": {**FFN, "num_experts_per_device": 0.7}}, "num_experts_per_device is 0.7; give n exp"),
    ({"experts": {**FFN, "num_experts_per_device": -2}}, "every 2 ranks, but there are 1 ranks"),
    ({"is_gshard_loss": False}, "is_gshard_loss is False, but gate 0 has no gate_noise"),
    ({"a2a_ffn_overlap_degree": 33}, "a2a_ffn_overlap_degree is 33; give a whole number from 1 to 32"),
    ({"parallel_type": "adaptive"}, "parallel_type is 'adaptive'; choose one of adaptive:r"),
    ({"use_2dh": "no"}, "use_2dh is 'no'; give True or False"),
    ({"group": "all"}, "group is 'all'; give a process group that this rank is in, or None"),
    ({"seeds": 1}, r"seeds is 1; give \(gate, experts, afterwards\)"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: str(value)[:50])
def test_bad_arguments_are_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message) as error:
        ft.moe_layer(**{"gate_type": TOP, "model_dim": D, "experts": FFN, **options})
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"top_k": 0}, "top_k is 0; give a whole number, at least 1"),
        ({"capacity_factor": float("nan")}, "capacity_factor is nan; give a finite number"),
        ({"a2a_ffn_overlap_degree": 0}, "a2a_ffn_overlap_degree is 0; give"),
        ({"reserve_dims": 3}, "reserve_dims is 3, but the input has shape"),
        ({"reserve_dims": 2}, "66 features per token, but model_dim is 6"),
        ({"inequivalent_tokens": 2}, "inequivalent_tokens is 2; give True or False"),
        ({"adaptive_r": 1.5}, "adaptive_r is 1.5; give a whole number, or None"),
        ({"megablocks_size": -1}, "megablocks_size is -1; give a whole number, at least 0"),
    ],
    ids=str,
)
def test_bad_keywords_are_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message) as error:
        build()(tokens(T), **call)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
