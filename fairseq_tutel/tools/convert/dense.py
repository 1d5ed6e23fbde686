"""convert dense: make a dense checkpoint of one with experts, which stock fairseq opens.

Of every MoE layer one expert becomes the feed-forward network, or several become one network as wide as
they are together, each with an even share of the weight. The gate is gone: the outputs are the same only
where it made no difference, and the tool says whether it did. Shared experts become part of the network.
"""

import argparse
from typing import Any

from torch import Tensor

from fairseq_tutel.tools import one_file
from fairseq_tutel.tools.convert.dense_layer import dense_tensors, is_exact, usual_weight, widened
from fairseq_tutel.tools.convert.files import write
from fairseq_tutel.tools.convert.layers import Layer, dense_step, layers_of
from fairseq_tutel.tools.convert.moe_file import MoEFile, open_moe
from fairseq_tutel.tools.convert.options import PARTS, drop, model_options, name_of, rename
from fairseq_tutel.tools.convert.selection import by_layer, ids, refuse_unknown


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    parser = kinds.add_parser(
        "dense", help="make a dense checkpoint of chosen experts", description=__doc__
    )
    one_file.add_to(parser, "a checkpoint with experts")
    parser.add_argument(
        "--experts",
        nargs="+",
        required=True,
        metavar="IDS",
        help="by id: one, or several to be one wide network, or all; for all layers, as 0 or 0,1, or as "
        "decoder_1=3 decoder_3=0",
    )
    parser.add_argument(
        "--weight",
        type=float,
        metavar="W",
        help="what the chosen experts weigh together: by default what a token's experts do where their "
        "weights sum up to one number, else 1, for which a log's mean expert1_weight may be better",
    )
    parser.set_defaults(convert=run)


def run(arguments: argparse.Namespace) -> None:
    """Convert as the command line says, and say what the result computes.

    Raises:
        ValueError: it cannot be done.
    """
    path, output = one_file.paths(arguments)
    if arguments.weight is not None and not 0 < arguments.weight < 1e6:
        raise ValueError(f"--weight is {arguments.weight:g}; give a number above 0.")
    file = open_moe(path)
    chosen = _chosen(arguments.experts, file)
    steps, differ = {}, []
    for layer, config in file.layers.items():
        usual = usual_weight(config)
        weight = usual if arguments.weight is None else arguments.weight
        steps[layer] = dense_tensors(file.model, layer, config, chosen[layer], weight)
        if weight != usual or not is_exact(file.model, layer, config, chosen[layer]):
            differ.append(layer.label)
    widths = _widen(file, steps)
    _make_dense(file.state, widths)
    write(file.with_model(_weights(file, steps)), output)
    print(f"wrote {output}: {name_of(file.state, 'model')}, a training begins anew with it")
    if differ:
        print(
            f"its outputs are not the MoE model's: the gate makes a difference in {', '.join(differ)}"
        )
    else:
        print("its outputs are the MoE model's, to rounding")


def _chosen(words: list[str], file: MoEFile) -> dict[Layer, list[int]]:
    """Return the experts that become the network of every layer.

    Raises:
        ValueError: ids of no experts, or a layer without any.
    """
    all_of = {layer: list(range(config.num_experts)) for layer, config in file.layers.items()}
    read = by_layer("--experts", words, list(file.layers), _ids_or_all)
    for layer, found in read.items():
        refuse_unknown("--experts", layer, found or [], len(all_of[layer]))
    for layer in all_of:
        if layer not in read:
            raise ValueError(
                f"--experts names none for {layer.label}; add {layer.label}=0, or the like."
            )
    return {layer: read[layer] or all_of[layer] for layer in all_of}


def _ids_or_all(text: str) -> list[int]:
    """Read ids; no ids stand for all."""
    try:
        return [] if text == "all" else ids(text)
    except ValueError as error:
        raise ValueError(f"{error}, or all") from None


def _widen(file: MoEFile, steps: dict[Layer, dict[str, Tensor]]) -> dict[str, int]:
    """Add the dense layers' steps, make all of a side equally wide, and return the sides' widths."""
    for layer in layers_of(file.model):
        if not layer.has_experts:
            steps[layer] = dense_step(file.model, layer)
    widths: dict[str, int] = {}
    for layer, step in steps.items():
        widths[layer.side] = max(widths.get(layer.side, 0), len(step["fc1.bias"]))
    for layer, step in steps.items():
        if len(step["fc1.bias"]) < widths[layer.side]:
            steps[layer] = widened(step, widths[layer.side])
            print(f"{layer.label}: hidden units of 0 are added, {widths[layer.side]} in all")
    return widths


def _make_dense(state: dict[str, Any], widths: dict[str, int]) -> None:
    """Let the options be those of a dense model, by the names that stock fairseq knows."""
    from fairseq_tutel.criterions.gate_loss import GateLossOptions
    from fairseq_tutel.plugin.flags import EncoderDecoderOptions, SystemOptions, defaults

    for part in PARTS:
        rename(state, part, name_of(state, part).removeprefix("moe_"))
    for known in (EncoderDecoderOptions, SystemOptions, GateLossOptions):
        drop(state, defaults(known))
    for side, width in widths.items():
        model_options(state)[f"{side}_ffn_embed_dim"] = width


def _weights(file: MoEFile, steps: dict[Layer, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the dense model's state dict, in its order."""
    made: dict[str, Tensor] = {}
    begun: set[Layer] = set()
    of_name = {f"{layer.name}.": layer for layer in steps}
    for key, tensor in file.model.items():
        prefix = next((name for name in of_name if key.startswith(name)), "")
        map_name = key.removeprefix(prefix).partition(".")[0]
        if not prefix or map_name not in ("fc1", "fc2", "ffn_layernorm"):
            made[key] = tensor
        elif of_name[prefix] not in begun:
            layer = of_name[prefix]
            begun.add(layer)
            made |= {f"{layer.name}.{name}": value for name, value in steps[layer].items()}
    return made
