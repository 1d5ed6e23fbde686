"""Prunes the experts of a checkpoint, or converts the checkpoint to a dense model."""

import argparse
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F

from fairseq_tutel.checkpoint.saved import DENSE, LAYER_NORM, PARTS, Layer, SavedModel
from fairseq_tutel.checkpoint.shards import ShardedTensor
from fairseq_tutel.convert import sharded
from fairseq_tutel.convert.command import NEW_RUN
from fairseq_tutel.convert.configs import (
    Tensors,
    configs_of,
    counts_text,
    per_expert,
    replaced,
    without_experts,
)
from fairseq_tutel.convert.upcycle import sums_to_1
from fairseq_tutel.moe.config import GATE_TYPES, LAYER, MoEConfig, label_of
from fairseq_tutel.moe.slots import capacity_of
from fairseq_tutel.option import options_in
from fairseq_tutel.plugin.feed_forward import SIDES
from fairseq_tutel.plugin.options import BY_OWNER, options_of
from fairseq_tutel.tools.selection import expert_ids, scores
from fairseq_tutel.vision.options import SwinExpertsConfig


def prune(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert prune`."""
    saved = SavedModel.open(inputs[0], keep_shards=True)
    configs = configs_of(saved)
    if arguments.drop is not None:
        dropped = expert_ids("--drop", arguments.drop, configs)
        kept = {
            layer: [i for i in range(configs[layer].num_experts) if i not in ids]
            for layer, ids in dropped.items()
        }
    else:
        found = scores(arguments, configs)
        if not found or not 0 < arguments.share <= 1:
            raise ValueError(
                f"--share is {arguments.share:g}; give a number above 0, at most 1, and the loads as "
                "--log, --load or --statistics."
            )
        least = {
            layer: min(arguments.moe_top_k or configs[layer].top_k, configs[layer].num_experts)
            for layer in found
        }
        kept = kept_by_share(found, arguments.share, least, arguments.globally)
    for line in keep_experts(saved, kept, arguments.moe_top_k):
        print(line)
    sharded.to_full(saved, output)
    return NEW_RUN


def dense(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert dense`."""
    saved = SavedModel.open(inputs[0])
    configs = configs_of(saved)
    if arguments.experts == ["all"]:
        chosen = {layer: list(range(config.num_experts)) for layer, config in configs.items()}
    else:
        chosen = expert_ids("--experts", arguments.experts, configs, or_all=True)
    for layer in configs:
        if layer not in chosen:
            raise ValueError(
                f"--experts names no expert of {layer.label}; add one, such as {layer.label}=0."
            )
    padded, changed = to_dense(saved, chosen)
    for label, width in padded.items():
        print(f"{label}: padded with zeros to {width} hidden units")
    if changed:
        text = f"its outputs differ from the MoE model's if the gate has an effect in {', '.join(changed)}"
    else:
        text = "its outputs equal the MoE model's outputs up to rounding"
    saved.write(output)
    return f": {saved.name('model')}{NEW_RUN}\n{text}"


def keep_experts(
    saved: SavedModel, kept: Mapping[Layer, Sequence[int]], top_k: int | None = None
) -> list[str]:
    """Remove all experts of a checkpoint except the experts in `kept`, in place.

    Layers that are not in `kept` keep all experts. The function returns one line per MoE layer, with the
    old IDs of the layer's remaining experts.

    Raises:
        ValueError: the remaining experts do not fit the layer's gate, expert groups or top_k.
    """
    weights, counts, lines = dict(saved.weights), [], []
    for layer, config in configs_of(saved).items():
        ids = list(kept.get(layer, range(config.num_experts)))
        try:
            chosen = config.top_k if top_k is None else top_k
            dataclasses.replace(config, num_experts=len(ids), top_k=chosen)
        except ValueError as error:
            raise ValueError(f"{layer.label}: {error}") from None
        if len(ids) < config.num_experts:
            _refuse_gates(config, layer)
            _refuse_uneven_groups(config, layer, ids)
            for name in per_expert(saved, layer, config):
                stack = weights[name]
                weights[name] = stack.select(ids) if isinstance(stack, ShardedTensor) else stack[ids]
        counts.append(len(ids))
        names = "/".join(map(str, ids))
        lines.append(f"{layer.label}: {config.num_experts} -> {len(ids)} experts, {names}")
    saved.options["moe_expert_count"] = counts_text(counts)
    if top_k is not None:
        saved.options.update(moe_top_k=top_k, moe_top1_expert=False)
    saved.restart(weights)
    return lines


def _refuse_gates(config: MoEConfig, layer: Layer) -> None:
    for kind in config.gate_types:
        if kind not in GATE_TYPES:
            raise ValueError(
                f"{layer.label} has the custom gate {kind} ({label_of('gate_type')}), whose tensors have "
                "an unknown layout; convert prune accepts linear, biased and cosine gates."
            )


def _refuse_uneven_groups(config: MoEConfig, layer: Layer, kept: Sequence[int]) -> None:
    size = config.num_experts // config.expert_groups
    counts = Counter(i // size for i in kept)
    if len({counts[group] for group in range(config.expert_groups)}) > 1:
        raise ValueError(
            f"{layer.label} has {config.expert_groups} groups of {size} neighboring experts "
            f"({label_of('expert_groups')}); keep the same number of experts in each group."
        )


def to_dense(saved: SavedModel, chosen: Mapping[Layer, Sequence[int]]) -> tuple[dict[str, int], list[str]]:
    """Replace the experts of every MoE layer by one dense FFN, in place.

    The new dense FFN concatenates the hidden units of the chosen experts. If the gate weights of every
    token have the same sum, the chosen experts' total weight is this sum, else 1. The function returns the
    hidden dimensions of padded layers by label, and the labels of layers whose outputs may change.

    Raises:
        ValueError: a dense FFN cannot represent the experts.
    """
    made: dict[Layer, Tensors] = {}
    changed = []
    for layer, config in configs_of(saved).items():
        weight = config.routed_scaling_factor if sums_to_1(config) else 1.0
        weight *= (1 - config.eom) * (1 - config.fom)
        made[layer] = _dense_ffn(saved, layer, config, chosen[layer], weight)
        if not _is_exact(saved, layer, config):
            changed.append(layer.label)
    made |= {layer: saved.dense_ffn(layer) for layer in saved.layers if not layer.has_experts}
    widths, padded = _pad(made)
    _use_dense_options(saved, widths)
    saved.restart(replaced(saved, made))
    return padded, changed


def _pad(made: dict[Layer, Tensors]) -> tuple[dict[str, int], dict[str, int]]:
    """Pad FFNs with zeros, to equal hidden dimensions in all layers of an encoder, decoder or Swin stage.

    The function returns the hidden dimension of each encoder, decoder or stage, and of each padded layer.
    """
    widths: dict[str, int] = {}
    for layer, ffn in made.items():
        widths[layer.side] = max(widths.get(layer.side, 0), len(ffn["fc1.bias"]))
    padded = {}
    for layer, ffn in made.items():
        more = widths[layer.side] - len(ffn["fc1.bias"])
        if more and LAYER_NORM[0] in ffn:
            raise ValueError(
                "INPUT normalizes hidden layers (--scale-fc) of different widths, but in a dense model "
                "all hidden layers have the same width; choose --experts with equal widths."
            )
        if more:
            padded[layer.label] = widths[layer.side]
            ffn["fc1.weight"] = F.pad(ffn["fc1.weight"], (0, 0, 0, more))
            ffn["fc1.bias"] = F.pad(ffn["fc1.bias"], (0, more))
            ffn["fc2.weight"] = F.pad(ffn["fc2.weight"], (0, more))
    return widths, padded


def _use_dense_options(saved: SavedModel, widths: Mapping[str, int]) -> None:
    """Replace the MoE variants and options of a checkpoint by those of a dense fairseq model, in place."""
    for part in PARTS:
        saved.rename(part, without_experts(saved.name(part)))
    saved.drop([option.key for owner in BY_OWNER for option in options_of(owner)])
    saved.drop([option.key for option in options_in(SwinExpertsConfig)])
    saved.use_plain_options()
    options = saved.options
    for side, width in widths.items():
        if side in SIDES:
            options[f"{side}_ffn_embed_dim"] = width
            continue
        dim, ratio = options["swin_embed_dim"], options["swin_mlp_ratio"]
        if width != int(dim * 2 ** int(side.partition(".")[2]) * ratio):
            raise ValueError(
                f"--experts makes the FFNs of {side} {width} wide, but in Swin an FFN is {ratio:g} times "
                "as wide as a token (--swin-mlp-ratio); choose one expert of that width."
            )


def _dense_ffn(
    saved: SavedModel, layer: Layer, config: MoEConfig, chosen: Sequence[int], weight: float
) -> Tensors:
    """Return one dense FFN that joins the chosen experts, each with an equal part of the total `weight`."""
    _refuse_no_dense(config, layer, len(chosen))
    scale = weight / len(chosen)
    experts = [saved.expert(layer, i) for i in chosen]
    made = {}
    for name in DENSE:
        parts = [expert[name.replace(".", "_")] for expert in experts]
        if name.startswith("fc2") and scale != 1:
            parts = [part * scale for part in parts]
        if config.shared_experts:
            shared = saved.weights[f"{layer.moe}.beside.shared.{name}"]
            parts.append(shared * (1 - config.fom) if name.startswith("fc2") and config.fom else shared)
        if name == "fc2.bias":
            made[name] = torch.stack(parts).sum(dim=0)
        else:
            made[name] = torch.cat(parts, dim=1 if name == "fc2.weight" else 0)
    for kind in ("weight", "bias") if config.hidden_layer_norm else ():
        norm = saved.weights[f"{layer.moe}.experts.hidden_layer_norm.{kind}"]
        made[f"ffn_layernorm.{kind}"] = norm
    return made


def _refuse_no_dense(config: MoEConfig, layer: Layer, number: int) -> None:
    if config.expert_type != "ffn":
        raise ValueError(
            f"{layer.label} has experts of the type {config.expert_type} ({label_of('expert_type')}), but "
            "fairseq has no such dense layer; convert dense accepts only the type ffn."
        )
    for name in ("residual", "cmr"):
        if getattr(config, name):
            raise ValueError(
                f"{layer.label} mixes experts and a dense network per token ({label_of(name)}), which a "
                f"dense layer cannot do; convert dense accepts only models without {LAYER[name].flag}."
            )
    if config.hidden_layer_norm and (number > 1 or config.shared_experts):
        raise ValueError(
            f"{layer.label} normalizes the hidden layer of each expert (--scale-fc), which one dense layer "
            "cannot do for several experts; choose one expert in --experts, and a model without shared "
            "experts."
        )


def _is_exact(saved: SavedModel, layer: Layer, config: MoEConfig) -> bool:
    """Return whether a layer's experts are equal and any routing in evaluation gives the same output."""
    if not sums_to_1(config) or config.choice == "experts" or config.prescore:
        return False
    return not capacity_of(config, training=False).is_limited and all(
        torch.equal(expert, stack[0]) for stack in saved.stacks(layer).values() for expert in stack
    )


def kept_by_share(
    scores: Mapping[Layer, Sequence[float]], share: float, least: Mapping[Layer, int], globally: bool
) -> dict[Layer, list[int]]:
    """Return the sorted IDs of the experts to keep in each layer: the fraction `share` of all experts.

    By default, each layer keeps the same fraction of its experts: those with the highest scores. With
    `globally`, `share` is a fraction of the whole model's experts. Each layer then keeps the experts with
    the highest scores that together have a fraction t of the layer's total score; t is the same in all
    layers. Of experts with equal scores, those with lower IDs are kept.

    Koishekenov et al. 2023, Memory-efficient NLLB-200, describes global pruning.

    Args:
        scores: for each layer, the scores of its E experts, which are at least 0, and not all 0.
        share: the fraction of experts to keep, above 0 and at most 1.
        least: the minimum number of experts to keep in each layer, at most E.
        globally: whether layers may keep different fractions.
    """
    ranked = {layer: sorted(range(len(own)), key=lambda i: (-own[i], i)) for layer, own in scores.items()}
    if not globally:
        counts = {layer: max(least[layer], _rounded(share * len(ids))) for layer, ids in ranked.items()}
    else:
        # t is the fraction of the layer's total score that an expert and all better experts have together.
        order = []
        for layer, ids in ranked.items():
            sums = accumulate(scores[layer][i] / sum(scores[layer]) for i in ids)
            order += [(place >= least[layer], t, place, layer) for place, t in enumerate(sums)]
        total = max(_rounded(share * len(order)), sum(least.values()))
        counts = Counter(layer for *_, layer in sorted(order)[:total])
    return {layer: sorted(ids[: counts[layer]]) for layer, ids in ranked.items()}


def _rounded(number: float) -> int:
    return math.floor(number + 0.5)
