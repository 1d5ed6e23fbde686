"""convert merge, convert prune: fewer experts, each one of a layer's experts or the mean of several.

E experts; `members` has, for every new expert, the ids of those that it is made of.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.moe.config import GATE_TYPES, MoEConfig, label_of
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.checkpoint.saved import (
    Layer,
    MoEFile,
    counts_text,
    experts_of,
    gate_rows,
    open_moe,
)
from fairseq_tutel.convert.names import model_options
from fairseq_tutel.tools.convert.selection import (
    Loads,
    add_load_options,
    by_layer,
    ids,
    loads,
    refuse_twice,
    refuse_unknown,
)

MERGE = """
convert merge: fewer experts, each the mean of a group of them, weighted by their loads or all alike.
Rows of gates are averaged likewise. A mean of experts makes sense where they have the same origin, as the
copies of an upcycled model have; of experts that were drawn apart it is like none of them. Where all
experts are the same and the weights of a token's experts sum to 1, the outputs stay what they were.
"""
PRUNE = """
convert prune: drop experts, by id or because hardly a token chooses them. What is left computes what it
did: where the weights of a token's experts are divided by their sum, which is the default for two and
more, a token that chose none of the dropped experts has the same output.
"""
Members = Sequence[Sequence[int]]


def add_to(kinds: Any) -> None:
    """Add both conversions to the command line."""
    source = "a checkpoint with experts"
    text = "make fewer experts, each the mean of some"
    merging = add_conversion(kinds, "merge", merge, text, MERGE, source)
    which = merging.add_mutually_exclusive_group(required=True)
    text = (
        "experts of a MoE layer afterwards, each made of neighbours: one number, or one per layer"
    )
    which.add_argument("--moe-expert-count", metavar="N", help=text)
    text = "the experts that become one, by id, as 0,3/1,2, for all layers or as decoder_1=0,3/1,2"
    which.add_argument("--groups", nargs="+", metavar="GROUPS", help=text)
    text = "drop experts, by id or by their load"
    pruning = add_conversion(kinds, "prune", prune, text, PRUNE, source)
    which = pruning.add_mutually_exclusive_group(required=True)
    text = "the experts to drop, as 3,5, in all layers, or as decoder_1=3,5 encoder_3=0"
    which.add_argument("--drop", nargs="+", metavar="IDS", help=text)
    text = "drop experts with less load than this by --log or --load; an even share is 1"
    which.add_argument("--below", type=float, metavar="LOAD", help=text)
    text = "experts per token afterwards; as before if not given"
    for parser in (merging, pruning):
        parser.add_argument("--moe-top-k", type=int, metavar="K", help=text)
        add_load_options(parser)


def merge(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    """Merge as the command line says."""
    file = open_moe(path)
    load = loads(arguments, file.layers)
    if arguments.groups is not None:
        members = _groups_of(arguments.groups, file.layers)
    else:
        members = _neighbours(arguments.moe_expert_count, file.layers)
    lines = {}
    for layer, config in file.layers.items():
        groups = members.get(layer, _each(config))
        lines[layer] = f", {_described(groups)}"
        without = [
            g for g in groups if len(g) > 1 and layer in load and not any(load[layer][i] for i in g)
        ]
        if without:
            lines[layer] += f"; without load, so that the mean is even: {_described(without)}"
    _write(file, members, load, arguments.moe_top_k, lines, output)
    print(
        f"wrote {output}; means are {'by load' if load else 'even'}, and a training begins anew with it"
    )


def prune(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    """Prune as the command line says."""
    file = open_moe(path)
    members, lines = {}, {}
    for layer, gone in _dropped(arguments, file.layers).items():
        num_experts = file.layers[layer].num_experts
        members[layer] = [[i] for i in range(num_experts) if i not in gone]
        if not members[layer]:
            flag = "--drop" if arguments.drop is not None else f"--below {arguments.below:g}"
            raise ValueError(
                f"{flag} leaves none of the {num_experts} experts of {layer.label}; keep one."
            )
        lines[layer] = f", without {', '.join(map(str, gone))}" if gone else ""
    _write(file, members, {}, arguments.moe_top_k, lines, output)
    print(f"wrote {output}; a training begins anew with it")


def _groups_of(
    words: Sequence[str], layers: Mapping[Layer, MoEConfig]
) -> dict[Layer, list[list[int]]]:
    """Return the groups that the command line names, which must be all experts, each once."""
    found = by_layer("--groups", words, list(layers), _read_groups)
    for layer, groups in found.items():
        E, named = layers[layer].num_experts, [i for group in groups for i in group]
        refuse_unknown("--groups", layer, named, E)
        if sorted(named) != list(range(E)):
            raise ValueError(
                f"--groups names {len(set(named))} of the {E} experts of {layer.label}; name every one "
                "once, a group of one to keep it (convert prune drops experts)."
            )
    return found


def _read_groups(text: str) -> list[list[int]]:
    try:
        groups = [ids(group) for group in text.split("/")]
    except ValueError as error:
        raise ValueError(f"{error}, and / between groups, as 0,3/1,2") from None
    refuse_twice([i for group in groups for i in group])
    return groups


def _neighbours(text: str, layers: Mapping[Layer, MoEConfig]) -> dict[Layer, list[list[int]]]:
    """Return groups of neighbours, as many as --moe-expert-count says."""
    from fairseq_tutel.plugin.flags import expert_counts

    found = {}
    for layer, count in zip(layers, expert_counts(text, len(layers)), strict=True):
        num_experts = layers[layer].num_experts
        if count > num_experts:
            raise ValueError(
                f"--moe-expert-count is {count}, but {layer.label} has {num_experts} experts; give "
                "no more than these."
            )
        edges = [i * num_experts // count for i in range(count + 1)]
        found[layer] = [list(range(a, b)) for a, b in pairwise(edges)]
    return found


def _dropped(
    arguments: argparse.Namespace, layers: Mapping[Layer, MoEConfig]
) -> dict[Layer, list[int]]:
    """Return the experts to drop, which must be there, or be known by their load."""
    load = loads(arguments, layers)
    if arguments.drop is not None:
        if load:
            raise ValueError(
                "--drop names the experts, so that --log and --load have no use; leave them out, or give "
                "--below in its place."
            )
        found = by_layer("--drop", arguments.drop, list(layers), ids)
        for layer, of_layer in found.items():
            refuse_unknown("--drop", layer, of_layer, layers[layer].num_experts)
        return found
    if not load:
        raise ValueError(
            f"--below is {arguments.below:g}, but there are no loads to go by; add --log or --load."
        )
    return {
        layer: [i for i, share in enumerate(of_layer) if share < arguments.below]
        for layer, of_layer in load.items()
    }


def _each(config: MoEConfig) -> list[list[int]]:
    """Return the members of experts that stay what they are."""
    return [[i] for i in range(config.num_experts)]


def _described(members: Members) -> str:
    return "/".join(",".join(map(str, group)) for group in members)


def _write(
    file: MoEFile,
    members: Mapping[Layer, Members],
    load: Loads,
    top_k: int | None,
    lines: Mapping[Layer, str],
    output: Path,
) -> None:
    """Write the checkpoint with its new experts, and print of every layer how many it has.

    Args:
        file: the old one.
        members: of every new expert, of the layers that get some.
        load: [E], what members weigh; a layer, or a group, without any: all alike.
        top_k: experts of a token from now on; None as before.
        lines: what more to print of a layer.
        output: the file to write.

    Raises:
        ValueError: experts that a layer's gate, groups or top_k cannot do with.
    """
    model, counts = dict(file.model), []
    for layer, config in file.layers.items():
        of_layer = members.get(layer, _each(config))
        if of_layer != _each(config):
            _refuse_gates(config, layer, of_layer)
            _refuse_uneven_groups(config, layer, of_layer)
            for name in _names(file.model, layer, config):
                stack = file.model[name]
                model[name] = torch.stack([_mean(stack, g, load.get(layer)) for g in of_layer])
        _refuse_top_k(config, layer, len(of_layer), top_k)
        counts.append(len(of_layer))
        more = lines.get(layer, "")
        print(f"{layer.label}: {config.num_experts} -> {len(of_layer)} experts{more}")
    options = model_options(file.state)
    options["moe_expert_count"] = counts_text(counts)
    if top_k is not None:
        options.update(moe_top_k=top_k, moe_top1_expert=False)
    file.write(model, output)


def _names(model: Mapping[str, Tensor], layer: Layer, config: MoEConfig) -> list[str]:
    """Return the names of a layer's tensors that have an entry per expert."""
    names = [f"{layer.step}.experts.{name}" for name in experts_of(model, layer)]
    names += gate_rows(config, layer)
    bias = f"{layer.step}.balance_bias.bias"
    return [*names, bias] if bias in model else names


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


def _refuse_top_k(config: MoEConfig, layer: Layer, num_experts: int, top_k: int | None) -> None:
    top_k = config.top_k if top_k is None else top_k
    if top_k > num_experts:
        raise ValueError(
            f"{layer.label} would have {num_experts} expert{'s' * (num_experts > 1)}, but a token has "
            f"{top_k} (--moe-top-k); keep more, or give --moe-top-k {num_experts}."
        )
    try:
        dataclasses.replace(config, num_experts=num_experts, top_k=top_k)
    except ValueError as error:
        raise ValueError(f"{layer.label}: {error}") from None


def _refuse_gates(config: MoEConfig, layer: Layer, members: Members) -> None:
    for kind in config.gate_types:
        if kind not in GATE_TYPES:
            raise ValueError(
                f"{layer.label} has a gate of your own, {kind} ({label_of('gate_type')}), which does not "
                "say what of it is an expert's; merge and prune take linear, cosine and hash gates."
            )
        if kind == "hash" and members != [[i] for i in range(len(members))]:
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
