"""Fewer experts made of a layer's experts: each one of them, or the weighted mean of several.

E experts; `members` has, for every new expert, the ids of those that it is made of.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fairseq_tutel.moe.config import GATE_TYPES, MoEConfig, label_of
from fairseq_tutel.tools.convert.layers import Layer
from fairseq_tutel.tools.convert.moe_file import experts_of, gate_rows

Members = Sequence[Sequence[int]]


def add_top_k(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how many of the new experts a token has."""
    parser.add_argument(
        "--moe-top-k",
        type=int,
        metavar="K",
        help="experts per token afterwards; as before if not given",
    )


def mixed_config(config: MoEConfig, layer: Layer, members: Members, top_k: int | None) -> MoEConfig:
    """Return the configuration of the new experts.

    Args:
        config: of the layer now.
        layer: which it is.
        members: of every new expert.
        top_k: experts per token from now on; None as before.

    Raises:
        ValueError: experts that the layer's gate, groups or top_k cannot do with.
    """
    if [list(ids) for ids in members] != [[i] for i in range(config.num_experts)]:
        _refuse_gates(config, layer, members)
        _refuse_uneven_groups(config, layer, members)
    top_k = config.top_k if top_k is None else top_k
    if top_k > len(members):
        raise ValueError(
            f"{layer.label} would have {len(members)} expert{'s' * (len(members) > 1)}, but a token has "
            f"{top_k} (--moe-top-k); keep more, or give --moe-top-k {len(members)}."
        )
    try:
        return dataclasses.replace(config, num_experts=len(members), top_k=top_k)
    except ValueError as error:
        raise ValueError(f"{layer.label}: {error}") from None


def mixed_tensors(
    model: Mapping[str, Tensor],
    layer: Layer,
    config: MoEConfig,
    members: Members,
    load: Sequence[float] | None = None,
) -> dict[str, Tensor]:
    """Return the layer's tensors that have an entry per expert, of the new experts, by their names.

    Args:
        model: the state dict.
        layer: which of its layers.
        config: of the layer now.
        members: of every new expert.
        load: [E], what members weigh; None, or a group without any: all alike.
    """
    return {
        name: torch.stack([_mean(model[name], ids, load) for ids in members])
        for name in _names(model, layer, config)
    }


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


def _names(model: Mapping[str, Tensor], layer: Layer, config: MoEConfig) -> list[str]:
    names = [f"{layer.step}.experts.{name}" for name in experts_of(model, layer)]
    names += gate_rows(config, layer)
    bias = f"{layer.step}.balance_bias.bias"
    return [*names, bias] if bias in model else names


def _refuse_gates(config: MoEConfig, layer: Layer, members: Members) -> None:
    for kind in config.gate_types:
        if kind not in GATE_TYPES:
            raise ValueError(
                f"{layer.label} has a gate of your own, {kind} ({label_of('gate_type')}), which does not "
                "say what of it is an expert's; merge and prune take linear, cosine and hash gates."
            )
        if kind == "hash" and [list(ids) for ids in members] != [[i] for i in range(len(members))]:
            raise ValueError(
                f"{layer.label} has a hash gate ({label_of('gate_type')}), which chooses by ids; drop "
                "the last experts alone."
            )


def _refuse_uneven_groups(config: MoEConfig, layer: Layer, members: Members) -> None:
    if config.expert_groups == 1:
        return
    size = config.num_experts // config.expert_groups
    groups = [sorted({i // size for i in ids}) for ids in members]
    # As many new experts in each group as in the others, in the groups' order.
    even = [[g // (len(members) // config.expert_groups or 1)] for g in range(len(members))]
    if groups != even or len(members) % config.expert_groups:
        raise ValueError(
            f"{layer.label} has {config.expert_groups} groups of {size} neighbouring experts "
            f"({label_of('expert_groups')}); take as many experts of each, and none of two together."
        )
