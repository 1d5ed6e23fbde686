"""The tests compare output masking and conditional MoE routing (CMR) of Meta's nllb branch with loops."""

import dataclasses

import oracle
import pytest
import torch
import torch.nn.functional as F
from compare import same_function
from normal import normal
from torch import Tensor

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.routing import route

CONFIG = MoEConfig(model_dim=5, hidden_dim=6, num_experts=4, activation="gelu")
SEED = 11
OPTIONS = (
    {"eom": 0.4},
    {"eom": 0.4, "top_k": 1, "capacity_factor": 0.5, "routed_scaling_factor": 2.5},
    {"fom": 0.3, "shared_experts": 1},
    {"eom": 0.4, "fom": 0.3, "top_k": 3, "capacity_factor": 0.4},
    {"cmr": True, "cmr_gate_drop": 0.3},
    {"cmr": True, "cmr_gate_drop": 0.3, "eom": 0.4, "fom": 0.3, "capacity_factor": 0.4},
)


def build(training: bool, **options) -> MoELayer:
    return MoELayer(dataclasses.replace(CONFIG, **options), seed=5).double().train(training)


def dense(ffn, x_D: Tensor) -> Tensor:
    """Apply a dense FFN to one token."""
    return ffn.fc2(oracle.ACTIVATIONS["gelu"](ffn.fc1(x_D)))


def by_loop(layer: MoELayer, x_TD: Tensor, real: list[bool]) -> tuple[Tensor, Tensor]:
    """Compute the layer's output and the sum of its CMR gates; draw random numbers in the layer's order."""
    config, beside, training = layer.config, layer.beside, layer.training
    count, top_k = len(x_TD), config.top_k
    torch.manual_seed(SEED)
    drop_T = torch.ones(count, dtype=torch.float64)
    if config.cmr and training:
        drop_T = F.dropout(drop_T.unsqueeze(1), config.cmr_gate_drop)[:, 0]
    eom_TK = torch.rand(count, top_k) if config.eom and training else torch.ones(count, top_k)
    fom_T = torch.rand(count, 1)[:, 0] if config.fom and training else torch.ones(count)
    probs_TE = torch.softmax(x_TD @ layer.gate.weight.t(), dim=1)
    factor = config.capacity_factor if training else 0.0
    plan = oracle.plan(probs_TE.tolist(), top_k, factor, real)
    y, gates = [], x_TD.new_zeros(())
    for t, x_D in enumerate(x_TD):
        chosen = probs_TE[t][plan.expert_ids[t]]
        weights = (chosen / chosen.sum() if top_k > 1 else chosen) * config.routed_scaling_factor
        y_D = 0 * x_D
        for j, e in enumerate(plan.expert_ids[t]):
            if plan.kept[t][j] and eom_TK[t, j] >= config.eom:
                y_D = y_D + weights[j] * oracle.one_expert(layer.experts, e, x_D)
        y_D = y_D if training else (1 - config.eom) * y_D
        if config.cmr:
            g = torch.sigmoid(beside.cmr_gate.weight[0] @ x_D + beside.cmr_gate.bias[0]) * drop_T[t]
            y_D = g * y_D + (1 - g) * dense(beside.dense, x_D)
            gates = gates + g if real[t] else gates
        if config.shared_experts:
            y_D = y_D + dense(beside.shared, x_D)
        kept = fom_T[t] >= config.fom if training else 1 - config.fom
        y.append(kept * y_D if real[t] else 0 * y_D)
    return (torch.stack(y) if y else 0 * x_TD), gates


@pytest.mark.parametrize("count, padded", ((11, False), (11, True), (1, False), (0, False)))
@pytest.mark.parametrize("training", (False, True), ids=("evaluation", "training"))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_layer_with_output_masking_or_cmr_equals_a_loop_over_tokens(options, training, count, padded):
    layer = build(training, **options)
    x = normal(count, CONFIG.model_dim, seed=6).requires_grad_()
    mask = torch.arange(count) % 4 == 1 if padded else torch.zeros(count, dtype=torch.bool)

    def ours() -> Tensor:
        torch.manual_seed(SEED)
        y, output = layer(x, mask)
        assert (output.cmr_sum is None) == (not layer.config.cmr)
        gates = y.new_zeros(()) if output.cmr_sum is None else output.cmr_sum
        return torch.cat([y.flatten(), gates.view(1)])

    def loops() -> Tensor:
        y, gates = by_loop(layer, x, (~mask).tolist())
        return torch.cat([y.flatten(), gates.view(1)])

    same_function(ours, loops, {"x": x, **dict(layer.named_parameters())})


@pytest.mark.parametrize("choice", ("tokens", "experts"))
def test_an_output_mask_is_random_in_training_and_the_mean_mask_in_evaluation(choice):
    logits_TE = normal(4000, 4, seed=1)
    torch.manual_seed(3)
    plain = route(logits_TE, 2, 0.5, choice=choice, training=True)
    kept = {}
    for training in (True, False):
        masked = route(logits_TE, 2, 0.5, choice=choice, training=training, eom=0.2)
        assert torch.equal(masked.row_of_TK, plain.row_of_TK)  # The mask changes gate weights, not rows.
        has_row_TK = masked.row_of_TK >= 0
        kept[training] = masked.weights_TK[has_row_TK] / plain.weights_TK[has_row_TK]
    assert set(kept[True].tolist()) == {0.0, 1.0}
    assert kept[True].mean().item() == pytest.approx(0.8, abs=0.02)
    assert kept[False].numpy() == pytest.approx(0.8)
