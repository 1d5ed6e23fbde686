"""Merges or prunes experts: each new expert is an old one, or the mean of a group."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import Layer, SavedModel
from fairseq_tutel.convert.configs import configs_of, counts_text, gate_rows
from fairseq_tutel.moe.config import GATE_TYPES, MoEConfig, label_of

# IDs of the old experts that make up each new expert.
Groups = Sequence[Sequence[int]]


def neighbors(text: str, configs: Mapping[Layer, MoEConfig]) -> dict[Layer, Groups]:
    """Return groups of neighboring experts, as many as a value of --moe-expert-count says."""
    from fairseq_tutel.plugin.registration.flags import expert_counts

    found: dict[Layer, Groups] = {}
    for layer, count in zip(configs, expert_counts(text, len(configs)), strict=True):
        num_experts = configs[layer].num_experts
        if count > num_experts:
            raise ValueError(
                f"--moe-expert-count is {count}, but {layer.label} has {num_experts} experts; give "
                "no more than these."
            )
        edges = [i * num_experts // count for i in range(count + 1)]
        found[layer] = [list(range(a, b)) for a, b in pairwise(edges)]
    return found


def regroup(
    saved: SavedModel,
    groups: Mapping[Layer, Groups],
    loads: Mapping[Layer, Sequence[float]] | None = None,
    top_k: int | None = None,
) -> list[str]:
    """Replace the experts of a checkpoint by one expert per group, in place.

    Args:
        saved: a checkpoint with experts.
        groups: the groups of some MoE layers; other layers keep their experts.
        loads: weights [E] of the experts in the means; groups without any load have even weights.
        top_k: new number of experts per token; None to keep it.

    Returns:
        A line for each MoE layer with the old experts of each new one.

    Raises:
        ValueError: experts that do not fit a layer's gate, expert groups or top_k.
    """
    weights, counts, lines = dict(saved.weights), [], []
    for layer, config in configs_of(saved).items():
        unchanged = [[i] for i in range(config.num_experts)]
        of_layer = groups.get(layer, unchanged)
        if of_layer != unchanged:
            _refuse_gates(config, layer, of_layer)
            _refuse_uneven_groups(config, layer, of_layer)
            load = (loads or {}).get(layer)
            for name in _per_expert(saved, layer, config):
                stack = weights[name]
                weights[name] = torch.stack([_mean(stack, group, load) for group in of_layer])
        try:
            chosen = config.top_k if top_k is None else top_k
            dataclasses.replace(config, num_experts=len(of_layer), top_k=chosen)
        except ValueError as error:
            raise ValueError(f"{layer.label}: {error}") from None
        counts.append(len(of_layer))
        ids = "/".join(",".join(map(str, group)) for group in of_layer)
        lines.append(f"{layer.label}: {config.num_experts} -> {len(of_layer)} experts, {ids}")
    saved.options["moe_expert_count"] = counts_text(counts)
    if top_k is not None:
        saved.options.update(moe_top_k=top_k, moe_top1_expert=False)
    saved.restart(weights)
    return lines


def _per_expert(saved: SavedModel, layer: Layer, config: MoEConfig) -> list[str]:
    """Return the names of a layer's tensors that have an entry per expert."""
    names = [f"{layer.moe}.experts.{name}" for name in saved.stacks(layer)]
    names += gate_rows(config, layer)
    bias = f"{layer.moe}.balance_bias.bias"
    return [*names, bias] if bias in saved.weights else names


def _mean(stack: Tensor, ids: Sequence[int], load: Sequence[float] | None) -> Tensor:
    if len(ids) == 1:
        return stack[ids[0]]
    weights = torch.tensor([1.0 if load is None else load[i] for i in ids], dtype=torch.float64)
    if weights.sum() == 0:
        weights.fill_(1.0)
    weights /= weights.sum()
    total = torch.zeros(stack.shape[1:], dtype=torch.promote_types(stack.dtype, torch.float32))
    for i, weight in zip(ids, weights.tolist(), strict=True):
        total += weight * stack[i]
    return total.to(stack.dtype)


def _refuse_gates(config: MoEConfig, layer: Layer, groups: Groups) -> None:
    for kind in config.gate_types:
        if kind not in GATE_TYPES:
            raise ValueError(
                f"{layer.label} has a custom gate, {kind} ({label_of('gate_type')}), whose tensors have no "
                "known layout; merge and prune take linear, cosine and hash gates."
            )
        if kind == "hash" and groups != [[i] for i in range(len(groups))]:
            raise ValueError(
                f"{layer.label} has a hash gate ({label_of('gate_type')}), which chooses experts by ID; "
                "drop only the last experts."
            )


def _refuse_uneven_groups(config: MoEConfig, layer: Layer, groups: Groups) -> None:
    if config.expert_groups == 1:
        return
    size = config.num_experts // config.expert_groups
    found = [sorted({i // size for i in ids}) for ids in groups]
    # The same number of new experts in each of the gate's groups, in order.
    even = [[g // (len(groups) // config.expert_groups or 1)] for g in range(len(groups))]
    if found != even or len(groups) % config.expert_groups:
        raise ValueError(
            f"{layer.label} has {config.expert_groups} groups of {size} neighboring experts "
            f"({label_of('expert_groups')}); keep the same number in each, and merge none of two groups."
        )
