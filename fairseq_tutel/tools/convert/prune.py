"""convert prune: drop experts, by id or because hardly a token chooses them.

What is left computes what it did: where the weights of a token's experts are divided by their sum, which is
the default for two and more, a token that chose none of the dropped experts has the same output.
"""

import argparse
from typing import Any

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.tools import one_file
from fairseq_tutel.tools.convert import expert_load
from fairseq_tutel.tools.convert.files import write
from fairseq_tutel.tools.convert.layers import Layer
from fairseq_tutel.tools.convert.mixed_experts import add_top_k, mixed_config, mixed_tensors
from fairseq_tutel.tools.convert.moe_file import open_moe
from fairseq_tutel.tools.convert.selection import by_layer, ids, refuse_unknown


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    parser = kinds.add_parser(
        "prune", help="drop experts, by id or by their load", description=__doc__
    )
    one_file.add_to(parser, "a checkpoint with experts")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--drop",
        nargs="+",
        metavar="IDS",
        help="the experts to drop, as 3,5, in all layers, or as decoder_1=3,5 encoder_3=0",
    )
    which.add_argument(
        "--below",
        type=float,
        metavar="LOAD",
        help="drop experts with less load than this by --log or --load; an even share is 1",
    )
    add_top_k(parser)
    expert_load.add_to(parser)
    parser.set_defaults(convert=run)


def run(arguments: argparse.Namespace) -> None:
    """Prune as the command line says.

    Raises:
        ValueError: it cannot be done.
    """
    path, output = one_file.paths(arguments)
    file = open_moe(path)
    dropped = _dropped(arguments, file.layers)
    model, counts = dict(file.model), []
    for layer, config in file.layers.items():
        gone = dropped.get(layer, [])
        kept = [[i] for i in range(config.num_experts) if i not in gone]
        if not kept:
            flag = "--drop" if arguments.drop is not None else f"--below {arguments.below:g}"
            raise ValueError(
                f"{flag} leaves none of the {config.num_experts} experts of {layer.label}; keep one."
            )
        mixed_config(config, layer, kept, arguments.moe_top_k)
        if gone:
            model |= mixed_tensors(file.model, layer, config, kept)
        counts.append(len(kept))
        without = f", without {', '.join(map(str, gone))}" if gone else ""
        print(f"{layer.label}: {config.num_experts} -> {len(kept)} experts{without}")
    file.set_counts(counts, arguments.moe_top_k)
    write(file.with_model(model), output)
    print(f"wrote {output}; a training begins anew with it")


def _dropped(
    arguments: argparse.Namespace, layers: dict[Layer, MoEConfig]
) -> dict[Layer, list[int]]:
    """Return the experts to drop.

    Raises:
        ValueError: experts that there are not, or no loads to go by.
    """
    load = expert_load.loads(arguments, layers)
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
