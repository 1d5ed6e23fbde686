"""Adds experts to a MoE checkpoint: `convert upcycle` of a model that has experts already.

Each expert is replaced by n neighboring copies. With equal gate rows, a token would choose all copies of
its best expert instead of its top_k experts. The same random vector u_c [model_dim] is therefore added to
the gate rows of the c-th copies of all experts. For a token x, the logits of these copies all increase by
u_c x. If the vectors are large, x chooses only the copies with the largest u_c x. The softmax over these
copies equals the old softmax, so the token keeps its experts and their weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import Layer, SavedModel
from fairseq_tutel.convert.command import Variation
from fairseq_tutel.convert.configs import configs_of, counts_text, gate_rows, per_expert
from fairseq_tutel.moe.build import seeded_generator
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.option import flag_of
from fairseq_tutel.plugin.registration.flags import expert_counts

# Outputs stay equal only if tokens choose experts, and weights are a softmax of a linear gate's logits.
NEEDED = {"score_function": ("softmax",), "choice": ("tokens",), "gate_type": ("linear", "biased")}


def add_experts(saved: SavedModel, given: Mapping[str, Any], how: Variation) -> str:
    """Multiply the numbers of experts of a MoE checkpoint, in place; return a summary.

    Args:
        saved: a checkpoint with experts in all its MoE layers.
        given: options of the experts, by their keys; only moe_expert_count is accepted.
        how: the sizes of the changes to the copies and to their gate rows.

    Raises:
        ValueError: an option cannot be changed, or the gates do not allow copies.
    """
    others = [key for key in given if key != "moe_expert_count"]
    others += [
        key for key in ("reinitialize", "gate_scale") if getattr(how, key) != getattr(Variation, key)
    ]
    if others or not given:
        raise ValueError(
            "INPUT has experts already, so --moe-expert-count must be given, and "
            f"{flag_of(others[0]) if others else 'no other option of the experts'} must not."
        )
    configs, weights = configs_of(saved), dict(saved.weights)
    counts = expert_counts(given["moe_expert_count"], len(configs))
    for (layer, config), count in zip(configs.items(), counts, strict=True):
        copies, rest = divmod(count, config.num_experts)
        if rest or copies < 1:
            raise ValueError(
                f"--moe-expert-count is {count} for {layer.label}, which has {config.num_experts} experts; "
                "give a multiple."
            )
        _refuse_gate(config, layer)
        for name in per_expert(saved, layer, config):
            weights[name] = weights[name].repeat_interleave(copies, dim=0)
        if copies > 1:
            stacks = [f"{layer.moe}.experts.{name}" for name in saved.stacks(layer)]
            _vary(weights, stacks, gate_rows(config, layer), copies, how)
    saved.options["moe_expert_count"] = counts_text(counts)
    saved.restart(weights)
    old = counts_text([config.num_experts for config in configs.values()])
    return (
        f": {saved.name('model')}, {old} -> {counts_text(counts)} experts\n"
        "its initial outputs nearly equal the old outputs; a larger --gate-spread makes them more equal"
    )


def _refuse_gate(config: MoEConfig, layer: Layer) -> None:
    values = [("score_function", config.score_function), ("choice", config.choice)]
    values += [("gate_type", str(kind)) for kind in config.gate_types]
    for name, value in values:
        if value not in NEEDED[name]:
            raise ValueError(
                f"{layer.label} has {label_of(name)} {value}, but experts can be added only to "
                f"{' or '.join(NEEDED[name])}."
            )


def _vary(
    weights: dict[str, Tensor], stacks: Sequence[str], gates: Sequence[str], copies: int, how: Variation
) -> None:
    """Add noise to each expert's copies except the first, and vectors to the gate rows, in place."""
    generator = seeded_generator(how.seed, gates[0], -1, "copies")
    for name in stacks:
        for i, expert in enumerate(weights[name]):
            noise = torch.randn(expert.shape, generator=generator)
            size = how.expert_noise * expert.float().square().mean().sqrt()
            if i % copies and expert.is_floating_point():
                expert += (noise * size).to(expert.dtype)
    for name in gates:
        rows = weights[name]
        if rows.dim() == 2:  # The gate's bias has one dimension.
            vectors_nD = torch.randn(copies, rows.shape[1], generator=generator)
            vectors_nD *= how.gate_spread / rows.shape[1] ** 0.5
            rows += vectors_nD.repeat(len(rows) // copies, 1).to(rows.dtype)
