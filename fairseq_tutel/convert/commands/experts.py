"""Defines the subcommands merge, prune and dense of `convert`, which change the experts of a model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_tutel.convert.commands.conversion import NEW_RUN, Conversion, one_file, option
from fairseq_tutel.tools.selection import expert_ids, loads, scores

if TYPE_CHECKING:
    from fairseq_tutel.checkpoint.saved import Layer, SavedModel
    from fairseq_tutel.convert.experts import Groups
    from fairseq_tutel.moe.config import MoEConfig

    Kept = Mapping[Layer, list[int]]

COUNT = (
    "new number of experts: one number for all MoE layers, or one per layer; each new expert is the mean "
    "of neighboring experts"
)
GROUPS = "groups of expert IDs to merge: such as 0,3/1,2 for all layers, or decoder_1=0,3/1,2 for one"
DROP = "IDs of the experts to remove: such as 3,5 for all layers, or decoder_1=3,5 encoder_3=0"
BELOW = "remove experts whose load, or importance with --by, is below this; the mean of a layer is 1"
SHARE = (
    "share of the experts to keep: those with the highest load, or importance with --by; each layer keeps "
    "at least top-k experts"
)
GLOBALLY = (
    "take --share of all experts of the model; each layer then keeps the same share of its total load or "
    "importance, in place of the same number of experts"
)
BY = "compare experts by load or importance, which needs --statistics [load]"
STATISTICS = "read loads and importances from this file of `tokens --output-statistics`"
KEEP_FOR = (
    "language pairs in --statistics, separated by commas, for which experts are kept, such as de-en,fr-en "
    "[all pairs]"
)
LOG = "read the loads from this training log (of --log-format json), or from the log in this --save-dir"
LOAD = "loads, one number per expert: such as 0.5,2,1,0.5 for all layers, or decoder_1=0.5,1.5"
EXPERTS = (
    "IDs of the experts to use: such as 0, 0,1 (for one wide network) or all, in all layers; or "
    "decoder_1=3 decoder_3=0"
)
WEIGHT = (
    "total weight of the chosen experts [the sum of a token's weights if it is constant, else 1; the mean "
    "expert1_weight in the training log may be better]"
)


@one_file
def _merge(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Replace each group of experts by its mean, weighted by load or evenly.

    Rows of gates are averaged too. Merging is useful for experts with the same origin, such as the copies
    in an upcycled model.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert.configs import configs_of
    from fairseq_tutel.convert.experts import neighbors, regroup

    saved = SavedModel.open(inputs[0])
    configs = configs_of(saved)
    load = loads(arguments, configs)
    groups: Mapping[Layer, Groups]
    if arguments.groups is None:
        groups = neighbors(arguments.moe_expert_count, configs)
    else:
        groups = expert_ids("--groups", arguments.groups, configs, in_groups=True)
        for layer, of_layer in groups.items():
            E, named = configs[layer].num_experts, sum(map(len, of_layer))
            if named < E:
                raise ValueError(
                    f"--groups names {named} of the {E} experts of {layer.label}; name each expert once "
                    "(a group of one expert keeps this expert; `convert prune` removes experts)."
                )
    for line in regroup(saved, groups, load, arguments.moe_top_k):
        print(line)
    return saved, f"; means are {'weighted by load' if load else 'unweighted'}{NEW_RUN}"


def _prune(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Remove experts, chosen by ID, by load or by importance.

    If none of a token's experts is removed and its weights are normalized to the sum 1, its output does not
    change. For a top-k of at least 2, weights are normalized by default.

    The importance of an expert is its activity times exp(its confidence) (Koishekenov et al. 2023).
    Activity is the fraction of tokens whose first choice it is. Confidence is its mean gate probability
    over these tokens. `tokens --output-statistics` writes both to a file.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert import sharded
    from fairseq_tutel.convert.configs import configs_of
    from fairseq_tutel.convert.experts import regroup

    _refuse_prune(arguments)
    saved = SavedModel.open(inputs[0], keep_shards=True)
    configs = configs_of(saved)
    kept: Kept
    if arguments.drop is not None:
        dropped = expert_ids("--drop", arguments.drop, configs)
        kept = {
            layer: [i for i in range(configs[layer].num_experts) if i not in ids]
            for layer, (ids,) in dropped.items()
        }
    else:
        kept = _kept_by_score(arguments, configs)
    for layer, ids in kept.items():
        if not ids:
            flag = "--drop" if arguments.drop is not None else f"--below {arguments.below:g}"
            raise ValueError(
                f"{flag} removes all {configs[layer].num_experts} experts of {layer.label}; keep at least "
                "one expert."
            )
    groups = {layer: [[i] for i in ids] for layer, ids in kept.items()}
    for line in regroup(saved, groups, top_k=arguments.moe_top_k):
        print(line)
    sharded.to_full(saved, output)
    return NEW_RUN


def _refuse_prune(arguments: argparse.Namespace) -> None:
    if arguments.globally and arguments.share is None:
        raise ValueError("--globally applies only to --share; remove it, or give --share.")
    if arguments.share is not None and not 0 < arguments.share <= 1:
        raise ValueError(f"--share is {arguments.share:g}; give a number above 0, at most 1.")
    if arguments.drop is not None:
        given = [
            flag
            for flag in ("--log", "--load", "--statistics", "--keep-for", "--by")
            if getattr(arguments, flag[2:].replace("-", "_")) not in (None, "load")
        ]
        if given:
            raise ValueError(
                f"--drop names the experts to remove, so {given[0]} has no effect; remove it, or give "
                "--below or --share instead of --drop."
            )


def _kept_by_score(arguments: argparse.Namespace, configs: Mapping[Layer, MoEConfig]) -> Kept:
    """Return the sorted IDs of the experts that --below or --share keeps in each layer."""
    from fairseq_tutel.convert.pruning import kept_by_share

    found = scores(arguments, configs)
    if not found:
        by = "below" if arguments.share is None else "share"
        raise ValueError(
            f"--{by} is {getattr(arguments, by):g}, but no loads are given; add --log, --load or "
            "--statistics."
        )
    if arguments.share is None:
        return {
            layer: [i for i, score in enumerate(of_layer) if score >= arguments.below]
            for layer, of_layer in found.items()
        }
    least = {
        layer: min(arguments.moe_top_k or configs[layer].top_k, configs[layer].num_experts)
        for layer in found
    }
    return kept_by_share(found, arguments.share, least, arguments.globally)


@one_file
def _dense(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Make a dense checkpoint for stock fairseq from one or several experts per layer.

    In every MoE layer, the chosen experts become one feed-forward network: their hidden units are
    concatenated, with even weights. Shared experts become part of this network. Gates are removed. The tool
    prints the layers whose outputs may change.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert.configs import configs_of
    from fairseq_tutel.convert.experts import to_dense

    if arguments.weight is not None and not 0 < arguments.weight < 1e6:
        raise ValueError(f"--weight is {arguments.weight:g}; give a number above 0.")
    saved = SavedModel.open(inputs[0])
    configs = configs_of(saved)
    if arguments.experts == ["all"]:
        chosen = {layer: list(range(config.num_experts)) for layer, config in configs.items()}
    else:
        named = expert_ids("--experts", arguments.experts, configs, or_all=True)
        chosen = {layer: ids for layer, (ids,) in named.items()}
    for layer in configs:
        if layer not in chosen:
            raise ValueError(
                f"--experts names no expert of {layer.label}; add one, such as {layer.label}=0."
            )
    padded, changed = to_dense(saved, chosen, arguments.weight)
    for label, width in padded.items():
        print(f"{label}: padded with zeros to {width} hidden units")
    if changed:
        text = f"its outputs differ from the MoE model's if the gate has an effect in {', '.join(changed)}"
    else:
        text = "its outputs equal the MoE model's outputs up to rounding"
    return saved, f": {saved.name('model')}{NEW_RUN}\n{text}"


SOURCE = "a checkpoint with experts"
TOP_K = option("--moe-top-k", "new number of experts per token [unchanged]", "K", type=int)
LOADS = (option("--log", LOG, "PATH"), option("--load", LOAD, "LOADS", nargs="+"))
KINDS = (
    Conversion(
        name="merge",
        convert=_merge,
        example="moe.pt --moe-expert-count 4 --log SAVE --output merged.pt",
        one_of=(option("--moe-expert-count", COUNT, "N"), option("--groups", GROUPS, "GROUPS", nargs="+")),
        source=SOURCE,
        options=(TOP_K,),
        exclusive=(LOADS,),
    ),
    Conversion(
        name="prune",
        convert=_prune,
        example="moe.pt --share 0.5 --by importance --statistics use.json --output pruned.pt",
        one_of=(
            option("--drop", DROP, "IDS", nargs="+"),
            option("--below", BELOW, "SCORE", type=float),
            option("--share", SHARE, type=float),
        ),
        source=SOURCE,
        options=(
            TOP_K,
            option("--by", BY, choices=("load", "importance"), default="load"),
            option("--globally", GLOBALLY, action="store_true"),
            option("--keep-for", KEEP_FOR, "PAIRS"),
        ),
        exclusive=((*LOADS, option("--statistics", STATISTICS, "FILE", type=Path)),),
    ),
    Conversion(
        name="dense",
        convert=_dense,
        example="moe.pt --experts all --output dense.pt",
        source=SOURCE,
        options=(
            option("--experts", EXPERTS, "IDS", nargs="+", required=True),
            option("--weight", WEIGHT, "W", type=float),
        ),
    ),
)
