"""Command lines of `convert` that change the experts of a checkpoint: merge, prune, dense."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq_tutel.checkpoint.saved import Layer, SavedModel
from fairseq_tutel.convert import fewer_experts
from fairseq_tutel.convert.configs import configs_of
from fairseq_tutel.convert.dense import to_dense
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.tools.convert.selection import (
    add_load_options,
    by_layer,
    ids,
    loads,
    refuse_twice,
    refuse_unknown,
)

MERGE = """
convert merge: replace groups of experts by their means, weighted by load or evenly. Rows of gates are
averaged too. This is useful for experts with the same origin, such as the copies of an upcycled model.
"""
PRUNE = """
convert prune: remove experts by ID or by load. The output of a token without removed experts does not
change if the weights of its experts are divided by their sum, the default for a top-k of at least 2.
"""
DENSE = """
convert dense: make a dense checkpoint, which stock fairseq opens. In every MoE layer one expert becomes the
feed-forward network, or several side by side with even weights. Shared experts become part of it. Gates are
removed; the tool prints where the outputs may change.
"""
SOURCE = "a checkpoint with experts"
NEW_RUN = "start a new training run from it"


def add_to(kinds: Any) -> None:
    """Add the conversions to the command line."""
    _add_merge_and_prune(kinds)
    _add_dense(kinds)


def _add_merge_and_prune(kinds: Any) -> None:
    text = "replace groups of experts by their means"
    merging = add_conversion(kinds, "merge", _merge, text, MERGE, SOURCE)
    which = merging.add_mutually_exclusive_group(required=True)
    text = "new number of experts, each the mean of neighbors: one number, or one per MoE layer"
    which.add_argument("--moe-expert-count", metavar="N", help=text)
    text = "IDs of the experts to merge, as 0,3/1,2, for all layers or as decoder_1=0,3/1,2"
    which.add_argument("--groups", nargs="+", metavar="GROUPS", help=text)
    text = "remove experts, by ID or by load"
    pruning = add_conversion(kinds, "prune", _prune, text, PRUNE, SOURCE)
    which = pruning.add_mutually_exclusive_group(required=True)
    text = "IDs of the experts to remove, as 3,5, in all layers, or as decoder_1=3,5 encoder_3=0"
    which.add_argument("--drop", nargs="+", metavar="IDS", help=text)
    text = "remove experts with less load than this by --log or --load; an even load is 1"
    which.add_argument("--below", type=float, metavar="LOAD", help=text)
    text = "new number of experts per token [unchanged]"
    for parser in (merging, pruning):
        parser.add_argument("--moe-top-k", type=int, metavar="K", help=text)
        add_load_options(parser)


def _merge(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    saved = SavedModel.open(path)
    configs = configs_of(saved)
    load = loads(arguments, configs)
    if arguments.groups is not None:
        groups = _groups_of(arguments.groups, configs)
    else:
        groups = fewer_experts.neighbors(arguments.moe_expert_count, configs)
    lines = fewer_experts.regroup(saved, groups, load, arguments.moe_top_k)
    for (layer, config), line in zip(configs.items(), lines, strict=True):
        of_layer = groups.get(layer, [[i] for i in range(config.num_experts)])
        of_load = load.get(layer, [1.0] * config.num_experts)
        even = [g for g in of_layer if len(g) > 1 and not any(of_load[i] for i in g)]
        more = f"; without load, so that the mean is even: {_described(even)}" if even else ""
        print(f"{line}, {_described(of_layer)}{more}")
    saved.write(output)
    print(f"wrote {output}; means are {'by load' if load else 'even'}; {NEW_RUN}")


def _groups_of(
    words: Sequence[str], configs: Mapping[Layer, MoEConfig]
) -> dict[Layer, fewer_experts.Groups]:
    """Return the groups of --groups, which must be all experts, each once."""
    found = by_layer("--groups", words, list(configs), _read_groups)
    for layer, groups in found.items():
        E, named = configs[layer].num_experts, [i for group in groups for i in group]
        refuse_unknown("--groups", layer, named, E)
        if sorted(named) != list(range(E)):
            raise ValueError(
                f"--groups names {len(set(named))} of the {E} experts of {layer.label}; name every one "
                "once, in a group of one to keep it (convert prune removes experts)."
            )
    return dict(found)


def _read_groups(text: str) -> list[list[int]]:
    try:
        groups = [ids(group) for group in text.split("/")]
    except ValueError as error:
        raise ValueError(f"{error}, and / between groups, as 0,3/1,2") from None
    refuse_twice([i for group in groups for i in group])
    return groups


def _described(groups: fewer_experts.Groups) -> str:
    return "/".join(",".join(map(str, group)) for group in groups)


def _prune(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    saved = SavedModel.open(path)
    configs = configs_of(saved)
    removed = _removed(arguments, configs)
    groups = {}
    for layer, gone in removed.items():
        num_experts = configs[layer].num_experts
        groups[layer] = [[i] for i in range(num_experts) if i not in gone]
        if not groups[layer]:
            flag = "--drop" if arguments.drop is not None else f"--below {arguments.below:g}"
            raise ValueError(f"{flag} leaves none of the {num_experts} experts of {layer.label}; keep one.")
    lines = fewer_experts.regroup(saved, groups, top_k=arguments.moe_top_k)
    for layer, line in zip(configs, lines, strict=True):
        gone = removed.get(layer, [])
        print(line + (f", without {', '.join(map(str, gone))}" if gone else ""))
    saved.write(output)
    print(f"wrote {output}; {NEW_RUN}")


def _removed(arguments: argparse.Namespace, configs: Mapping[Layer, MoEConfig]) -> dict[Layer, list[int]]:
    """Return the experts to remove, by ID or by load."""
    load = loads(arguments, configs)
    if arguments.drop is not None:
        if load:
            raise ValueError(
                "--drop names the experts, so that --log and --load have no effect; leave them out, or "
                "give --below instead."
            )
        found = by_layer("--drop", arguments.drop, list(configs), ids)
        for layer, of_layer in found.items():
            refuse_unknown("--drop", layer, of_layer, configs[layer].num_experts)
        return found
    if not load:
        raise ValueError(f"--below is {arguments.below:g}, but there are no loads; add --log or --load.")
    return {
        layer: [i for i, share in enumerate(of_layer) if share < arguments.below]
        for layer, of_layer in load.items()
    }


def _add_dense(kinds: Any) -> None:
    text = "make a dense checkpoint of chosen experts"
    parser = add_conversion(kinds, "dense", _dense, text, DENSE, SOURCE)
    parser.add_argument(
        "--experts",
        nargs="+",
        required=True,
        metavar="IDS",
        help="IDs: one, several for one wide network, or all; for all layers, as 0 or 0,1, or as "
        "decoder_1=3 decoder_3=0",
    )
    parser.add_argument(
        "--weight",
        type=float,
        metavar="W",
        help="total weight of the chosen experts [the sum of a token's weights if it is constant, else 1; "
        "a log's mean expert1_weight may be better]",
    )


def _dense(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    if arguments.weight is not None and not 0 < arguments.weight < 1e6:
        raise ValueError(f"--weight is {arguments.weight:g}; give a number above 0.")
    saved = SavedModel.open(path)
    configs = configs_of(saved)
    padded, changed = to_dense(saved, _chosen(arguments.experts, configs), arguments.weight)
    for label, width in padded.items():
        print(f"{label}: hidden units of 0 are added, {width} in all")
    saved.write(output)
    print(f"wrote {output}: {saved.name('model')}; {NEW_RUN}")
    if changed:
        print(f"its outputs differ from the MoE model's if the gate has an effect in {', '.join(changed)}")
    else:
        print("its outputs are the MoE model's, to rounding")


def _chosen(words: Sequence[str], configs: Mapping[Layer, MoEConfig]) -> dict[Layer, Sequence[int]]:
    """Return the experts of --experts for every MoE layer."""
    read = by_layer("--experts", words, list(configs), _ids_or_all)
    for layer, found in read.items():
        refuse_unknown("--experts", layer, found, configs[layer].num_experts)
    for layer in configs:
        if layer not in read:
            raise ValueError(f"--experts names none for {layer.label}; add {layer.label}=0, or the like.")
    return {layer: read[layer] or range(config.num_experts) for layer, config in configs.items()}


def _ids_or_all(text: str) -> list[int]:
    """Read IDs; an empty list stands for all."""
    try:
        return [] if text == "all" else ids(text)
    except ValueError as error:
        raise ValueError(f"{error}, or all") from None
