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

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert.command import Variation
from fairseq_tutel.convert.configs import configs_of, counts_text, gate_rows, per_expert
from fairseq_tutel.moe.build import seeded_generator
from fairseq_tutel.plugin.registration.flags import expert_counts

# Supported values of routing options. With other values, outputs would not stay equal.
COPIED = {"softmax", "tokens", "linear", "biased"}


def add_experts(saved: SavedModel, given: Mapping[str, Any], how: Variation) -> str:
    """Multiply each layer's number of experts in a MoE checkpoint, in place; return a summary.

    `given` has options of the experts, by key; only moe_expert_count is accepted. `how` sets the sizes of
    the changes to copies and gates. Raises ValueError for other options, and if gates cannot be copied.
    """
    kept = Variation(seed=how.seed, expert_noise=how.expert_noise, gate_spread=how.gate_spread)
    if {*given} != {"moe_expert_count"} or how != kept:
        raise ValueError(
            "INPUT has experts already; give --moe-expert-count, and none of the other options of experts, "
            "--reinitialize and --gate-scale."
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
        if others := {config.score_function, config.choice, *map(str, config.gate_types)} - COPIED:
            raise ValueError(
                f"{layer.label} routes with {', '.join(sorted(others))}, but experts can be added only "
                "with softmax (--moe-score-function), tokens (--moe-choice), and linear or biased gates."
            )
        for name in per_expert(saved, layer, config):
            weights[name] = weights[name].repeat_interleave(copies, dim=0)
        stacks = [f"{layer.moe}.experts.{name}" for name in saved.stacks(layer)]
        _vary(weights, stacks, gate_rows(config, layer), copies, how)
    saved.options["moe_expert_count"] = counts_text(counts)
    saved.restart(weights)
    old = counts_text([config.num_experts for config in configs.values()])
    return (
        f": {saved.name('model')}, {old} -> {counts_text(counts)} experts\n"
        "its initial outputs equal the old outputs but for a few tokens; --gate-spread changes their number"
    )


def _vary(
    weights: dict[str, Tensor], stacks: Sequence[str], gates: Sequence[str], copies: int, how: Variation
) -> None:
    """Add noise to each expert's second and later copies, and a vector to each gate row, in place."""
    generator = seeded_generator(how.seed, gates[0], -1, "copies")
    for name in stacks:
        for i, expert in enumerate(weights[name]):
            noise = torch.randn(expert.shape, generator=generator)
            size = how.expert_noise * expert.float().square().mean().sqrt()
            expert += (noise * size * (i % copies > 0)).to(expert.dtype)
    for name in gates:
        rows = weights[name]
        if rows.dim() == 2:  # The gate's bias has one dimension.
            vectors_nD = torch.randn(copies, rows.shape[1], generator=generator)
            vectors_nD *= how.gate_spread / rows.shape[1] ** 0.5
            rows += vectors_nD.repeat(len(rows) // copies, 1).to(rows.dtype)
