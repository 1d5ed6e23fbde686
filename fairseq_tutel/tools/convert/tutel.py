"""tutel: write what ranks saved of a model with Tutel's moe_layer as one file of ours.

A state dict, for a model whose layers are fairseq_tutel.moe.layer with the same arguments; or a checkpoint
of Tutel's fairseq example, as a checkpoint of moe_transformer_lm or moe_transformer.
"""

import argparse
import re
from collections.abc import Iterable
from typing import Any

import torch

from fairseq_tutel.moe.config import ACTIVATIONS
from fairseq_tutel.tools.arguments import add_overwrite, output_path, refuse_output
from fairseq_tutel.tools.convert.files import write
from fairseq_tutel.tools.convert.tutel_fairseq import (
    is_fairseq,
    layer_to_ours,
    translate_to_ours,
    weight_to_ours,
)
from fairseq_tutel.tools.convert.tutel_files import (
    Weights,
    holders_of_tensors,
    input_file,
    open_ranks,
    with_weights,
)
from fairseq_tutel.tools.convert.tutel_layout import our_experts, our_gate

FLAG = "--input-prefix"
COUNT = "_num_global_experts"
LAYERS = ("moe_layer", "MoELayer")


def add_to(kinds: Any) -> None:
    """Add this conversion to the command line."""
    parser = kinds.add_parser("tutel", help="from Tutel", description=__doc__)
    parser.add_argument(
        FLAG,
        required=True,
        metavar="PREFIX",
        help="PREFIX0-of-N, PREFIX1-of-N, …; or a pattern with {rank} and {size} in it; or, with "
        "--input-size 1, the name of the one file, such as Tutel's own gather writes",
    )
    parser.add_argument(
        "--input-size", required=True, type=int, metavar="N", help="ranks that saved"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    add_overwrite(parser)
    add_namespace(parser)
    parser.add_argument(
        "--default-num-global-experts",
        type=int,
        metavar="E",
        help="experts of every layer, for files of an older Tutel, which do not say it",
    )
    parser.add_argument(
        "--expert-activation",
        choices=ACTIVATIONS,
        default="linear",
        help="what the experts of a fairseq checkpoint were trained with; Tutel's example has none, "
        "which is linear [linear]",
    )
    parser.set_defaults(convert=convert)


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """Add what both directions ask: where the weights are, and which class of ours has the layers."""
    parser.add_argument(
        "--namespace",
        metavar="KEYS",
        help="keys that lead to the weights in a file, joined by / [model, where there is one]",
    )
    parser.add_argument(
        "--layer",
        choices=LAYERS,
        default=LAYERS[0],
        help="class of ours that the layers of a state dict are of [moe_layer]",
    )


def convert(arguments: argparse.Namespace) -> None:
    """Convert what the command line names.

    Raises:
        ValueError: naming what is wrong and the fix.
    """
    pattern, size, output = (
        arguments.input_prefix,
        arguments.input_size,
        output_path(arguments.output),
    )
    if size < 1:
        raise ValueError(
            f"--input-size is {size}; give the number of ranks that saved, at least 1."
        )
    ranks, state, keys = open_ranks(pattern, size, arguments.namespace, FLAG)
    inputs = [input_file(pattern, rank, size) for rank in range(size)]
    refuse_output(output, inputs, arguments.overwrite)
    layers = layer_counts(ranks, arguments.default_num_global_experts)
    in_fairseq = is_fairseq(state, keys)
    weights = converted(ranks, layers, arguments.layer, in_fairseq)
    notes = differing(ranks, layers)
    state = with_weights(state, keys, weights)
    if in_fairseq:
        notes += translate_to_ours(state, layers, arguments.expert_activation)
    elif keys:
        for key in list(holders_of_tensors(state, but=keys[0])):
            del state[key]
            notes.append(f"{key} is left out: its tensors are rank 0's alone.")
    write(state, output)
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {output}")


def layer_counts(ranks: list[Weights], default: int | None) -> dict[str, int]:
    """Return the layers of Tutel's, as the prefix of their names, and how many experts each has.

    Raises:
        ValueError: there are none, their number is not said, or ranks do not fit it.
    """
    layers: dict[str, int] = {}
    for name, tensor in ranks[0].items():
        if name.rpartition(".")[2] == COUNT:
            layers[name.removesuffix(COUNT)] = int(tensor)
            if any(int(rank[name]) != int(tensor) for rank in ranks):
                raise ValueError(
                    f"{FLAG} has ranks that differ in {name}; give the files of one model."
                )
        elif default is not None:
            found = re.fullmatch(r"(|.+\.)experts\.(?:batched_fc1_w|W_fc1)", name)
            if found is not None:
                layers.setdefault(found[1], default)
    if not layers:
        raise ValueError(
            f"{FLAG} has no layer of Tutel's ({COUNT}); files of an older one need "
            "--default-num-global-experts."
        )
    for prefix, experts in layers.items():
        if experts < 1 or (experts % len(ranks) and len(ranks) % experts):
            layer = prefix.rstrip(".") or "the layer"
            raise ValueError(
                f"--input-size is {len(ranks)}, but {layer} has {experts} experts, which so many "
                "ranks cannot hold; give the number of ranks that saved."
            )
    return layers


def layer_of(name: str, layers: Iterable[str]) -> str | None:
    """Return the prefix of the layer that a weight is of, or None."""
    for prefix in layers:
        part = name.removeprefix(prefix)
        if name.startswith(prefix) and (part == COUNT or part.startswith(("experts.", "gate"))):
            return prefix
    return None


def differing(ranks: list[Weights], layers: Iterable[str]) -> list[str]:
    """Say how many weights differ between ranks, of those that all should have alike."""
    names = []
    for name, tensor in ranks[0].items():
        prefix = layer_of(name, layers)
        is_expert = prefix is not None and name.startswith(f"{prefix}experts.")
        if torch.is_tensor(tensor) and not is_expert:
            names += [name] * any(not torch.equal(tensor, rank[name]) for rank in ranks[1:])
    if not names:
        return []
    return [f"{len(names)} weights differ between ranks, such as {names[0]}; rank 0's are taken."]


def converted(ranks: list[Weights], layers: dict[str, int], kind: str, in_fairseq: bool) -> Weights:
    """Return all weights under our names, with all experts; what is no layer's is rank 0's.

    Args:
        ranks: the weights of every rank.
        layers: prefix of every layer, and its experts.
        kind: class of ours that the layers will be of.
        in_fairseq: they stand in a checkpoint of Tutel's fairseq example.

    Raises:
        ValueError: a layer lacks a weight, or has one of another size.
    """
    weights: Weights = {}
    done = set()
    for name, tensor in ranks[0].items():
        prefix = layer_of(name, layers)
        if prefix is None:
            weights[weight_to_ours(name, layers) if in_fairseq else name] = tensor
        elif prefix not in done:
            done.add(prefix)
            ours = layer_to_ours(prefix) if in_fairseq else prefix + "moe." * (kind == LAYERS[0])
            try:
                found = _layer(ranks, prefix, layers[prefix])
            except ValueError as error:
                raise ValueError(
                    f"{FLAG} has the layer {prefix.rstrip('.') or 'at the top'} that {error}; give the "
                    "files of one model."
                ) from error
            weights.update({ours + key: value for key, value in found.items()})
    return weights


def _layer(ranks: list[Weights], prefix: str, num_experts: int) -> Weights:
    """Return one layer's weights under our names."""
    own = [name.removeprefix(prefix) for name in ranks[0] if name.startswith(prefix)]
    gates: Weights = {}
    for name in own:
        found = re.fullmatch(r"gates?\.(?:(\d+)\.)?(.+)", name)
        if found is not None:
            index = int(found[1] or 0)
            key, tensor = our_gate(found[2], ranks[0][prefix + name])
            gates[f"other_gates.{index - 1}.{key}" if index else f"gate.{key}"] = tensor
    parts = {
        name.removeprefix("experts."): [rank[prefix + name] for rank in ranks]
        for name in own
        if name.startswith("experts.")
    }
    if not parts:
        raise ValueError("lacks its experts")

    def model_dim() -> int:
        for key in ("gate.weight", "gate.projection_weight"):
            if key in gates:
                return gates[key].shape[1]
        raise ValueError(
            "has llama_ffn behind a custom gate, so that nothing says the width of a token"
        )

    experts = our_experts(parts, num_experts, model_dim)
    return {**gates, **{f"experts.{key}": tensor for key, tensor in experts.items()}}
