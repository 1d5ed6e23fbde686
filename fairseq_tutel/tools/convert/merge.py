"""convert merge: fewer experts, each the mean of a group of them, weighted by their loads or all alike.

Rows of gates are averaged likewise. A mean of experts makes sense where they have the same origin, as the
copies of an upcycled model have; of experts that were drawn apart it is like none of them. Where all
experts are the same and the weights of a token's experts sum to 1, the outputs stay what they were.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.tools import one_file
from fairseq_tutel.tools.convert import expert_load
from fairseq_tutel.tools.convert.files import write
from fairseq_tutel.tools.convert.layers import Layer
from fairseq_tutel.tools.convert.mixed_experts import (
    Members,
    add_top_k,
    mixed_config,
    mixed_tensors,
)
from fairseq_tutel.tools.convert.moe_file import open_moe
from fairseq_tutel.tools.convert.selection import by_layer, ids, refuse_twice, refuse_unknown


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    parser = kinds.add_parser(
        "merge", help="make fewer experts, each the mean of some", description=__doc__
    )
    one_file.add_to(parser, "a checkpoint with experts")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--moe-expert-count",
        metavar="N",
        help="experts of a MoE layer afterwards, each made of neighbours: one number, or one per layer",
    )
    which.add_argument(
        "--groups",
        nargs="+",
        metavar="GROUPS",
        help="the experts that become one, by id, as 0,3/1,2, for all layers or as decoder_1=0,3/1,2",
    )
    add_top_k(parser)
    expert_load.add_to(parser)
    parser.set_defaults(convert=run)


def run(arguments: argparse.Namespace) -> None:
    """Merge as the command line says.

    Raises:
        ValueError: it cannot be done.
    """
    path, output = one_file.paths(arguments)
    file = open_moe(path)
    load = expert_load.loads(arguments, file.layers)
    members = _members(arguments, file.layers)
    model, counts = dict(file.model), []
    for layer, config in file.layers.items():
        of_layer = members.get(layer, [[i] for i in range(config.num_experts)])
        mixed_config(config, layer, of_layer, arguments.moe_top_k)
        model |= mixed_tensors(file.model, layer, config, of_layer, load.get(layer))
        counts.append(len(of_layer))
        evenly = _evenly(of_layer, load[layer]) if layer in load else ""
        print(
            f"{layer.label}: {config.num_experts} -> {len(of_layer)} experts, "
            f"{_described(of_layer)}{evenly}"
        )
    file.set_counts(counts, arguments.moe_top_k)
    write(file.with_model(model), output)
    print(
        f"wrote {output}; means are {'by load' if load else 'even'}, and a training begins anew with it"
    )


def _members(
    arguments: argparse.Namespace, layers: dict[Layer, MoEConfig]
) -> dict[Layer, list[list[int]]]:
    """Return which experts become one.

    Raises:
        ValueError: groups that are not all experts once, or more experts than there are.
    """
    if arguments.groups is not None:
        found = by_layer("--groups", arguments.groups, list(layers), _groups)
        for layer, groups in found.items():
            E, named = layers[layer].num_experts, [i for group in groups for i in group]
            refuse_unknown("--groups", layer, named, E)
            if sorted(named) != list(range(E)):
                raise ValueError(
                    f"--groups names {len(set(named))} of the {E} experts of {layer.label}; name every one "
                    "once, a group of one to keep it (convert prune drops experts)."
                )
        return found
    from fairseq_tutel.plugin.flags import expert_counts

    counts = expert_counts(arguments.moe_expert_count, len(layers))
    found = {}
    for (layer, config), count in zip(layers.items(), counts, strict=True):
        if count > config.num_experts:
            raise ValueError(
                f"--moe-expert-count is {count}, but {layer.label} has {config.num_experts} experts; give "
                "no more than these."
            )
        edges = [i * config.num_experts // count for i in range(count + 1)]
        found[layer] = [list(range(a, b)) for a, b in pairwise(edges)]
    return found


def _groups(text: str) -> list[list[int]]:
    try:
        groups = [ids(group) for group in text.split("/")]
    except ValueError as error:
        raise ValueError(f"{error}, and / between groups, as 0,3/1,2") from None
    refuse_twice([i for group in groups for i in group])
    return groups


def _evenly(members: Members, load: Sequence[float]) -> str:
    """Say which groups have no load, so that all of their experts weigh alike."""
    groups = [group for group in members if len(group) > 1 and not any(load[i] for i in group)]
    return f"; without load, so that the mean is even: {_described(groups)}" if groups else ""


def _described(members: Members) -> str:
    return "/".join(",".join(map(str, group)) for group in members)
