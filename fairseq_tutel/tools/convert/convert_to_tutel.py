"""to-tutel: write a file of ours as those that ranks load into a model with Tutel's moe_layer.

A state dict of a model whose layers are fairseq_tutel.moe.layer; or a checkpoint of moe_transformer_lm or
moe_transformer, as those of Tutel's fairseq example.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint.shards import bind, unbind
from fairseq_tutel.tools.arguments import add_overwrite, refuse_output
from fairseq_tutel.tools.convert.files import load_any, write_all
from fairseq_tutel.tools.convert.tutel import COUNT, LAYERS, add_namespace
from fairseq_tutel.tools.convert.tutel_fairseq import is_fairseq, translate_to_tutel
from fairseq_tutel.tools.convert.tutel_files import (
    Weights,
    holders_of_tensors,
    rank_file,
    weights_in,
    with_weights,
)
from fairseq_tutel.tools.convert.tutel_layout import tutel_experts, tutel_gate

# The end of our name of a layer that is moe_ffn in Tutel's fairseq example.
EXAMPLE = "fc1."
NORM = "experts.hidden_layer_norm."


def add_to(kinds: Any) -> None:
    """Add this conversion to the command line."""
    parser = kinds.add_parser("to-tutel", help="to Tutel", description=__doc__)
    parser.add_argument("--input", required=True, metavar="FILE", help="a file of ours")
    parser.add_argument(
        "--output",
        required=True,
        metavar="PREFIX",
        help="PREFIX0-of-N, PREFIX1-of-N, …; or a pattern with {rank} and {size} in it",
    )
    parser.add_argument(
        "--ranks",
        required=True,
        type=int,
        metavar="N",
        help="ranks that are to load it: a divisor or a multiple of every layer's experts; of a fairseq "
        "checkpoint, as many as experts",
    )
    add_overwrite(parser)
    add_namespace(parser)
    parser.set_defaults(convert=convert)


def convert(arguments: argparse.Namespace) -> None:
    """Convert what the command line names.

    Raises:
        ValueError: naming what is wrong and the fix.
    """
    source, size = Path(arguments.input), arguments.ranks
    state = load_any(source, "--input")
    if isinstance(state, dict):
        bind(state, source)
        unbind(state)
    ours, keys = weights_in(state, source, arguments.namespace, "--input")
    in_fairseq = is_fairseq(state, keys)
    within = EXAMPLE if in_fairseq else "moe." * (arguments.layer == LAYERS[0])
    layers = layers_of(ours, within)
    for prefix, experts in layers.items():
        if size < 1 or (experts % size and size % experts):
            layer = prefix.rstrip(".") or "the layer"
            raise ValueError(
                f"--ranks is {size}, but {layer} has {experts} experts; give a divisor or a multiple."
            )
    outputs = [rank_file(arguments.output, rank, size) for rank in range(size)]
    for path in outputs:
        refuse_output(path, [source], arguments.overwrite)
    notes = []
    if in_fairseq:
        notes += translate_to_tutel(state, size, max(layers.values()))
    elif keys:
        for key in list(holders_of_tensors(state, but=keys[0])):
            del state[key]
            notes.append(f"{key} is left out: it has tensors of all experts.")
    write_all(
        (path, with_weights(state, keys, rank_weights(ours, layers, within, size, rank)))
        for rank, path in enumerate(outputs)
    )
    for note in notes:
        print(f"note: {note}")
    print("wrote", *outputs)


def layers_of(ours: Weights, within: str) -> dict[str, int]:
    """Return the MoE layers, as the prefix of their names here, and how many experts each has.

    Args:
        ours: all weights.
        within: the end of that prefix.

    Raises:
        ValueError: there are none.
    """
    pattern = re.compile(rf"((?:|.+\.){re.escape(within)})experts\.[^.]+")
    layers = {
        found[1]: tensor.shape[0]
        for name, tensor in ours.items()
        if (found := pattern.fullmatch(name))
        and any(other.startswith(f"{found[1]}gate.") for other in ours)
    }
    if not layers:
        raise ValueError(
            f"--input has no layer {within}experts beside a {within}gate; give --layer the class of the "
            "layers (moe_layer holds a MoELayer by the name of moe)."
        )
    return layers


def rank_weights(
    ours: Weights, layers: dict[str, int], within: str, size: int, rank: int
) -> Weights:
    """Return what one rank loads.

    Args:
        ours: all weights.
        layers: prefix of every layer, and its experts.
        within: the end of these prefixes, which Tutel's lack; its fairseq example has another.
        size: the ranks.
        rank: which.

    Raises:
        ValueError: a layer has something that Tutel's has not.
    """
    weights: Weights = {}
    done = set()
    for name, tensor in ours.items():
        prefix = next((p for p in layers if name.startswith(p)), None)
        if prefix is None:
            weights[name] = tensor
        elif prefix not in done:
            done.add(prefix)
            theirs = prefix.removesuffix(within) + "moe_ffn." * (within == EXAMPLE)
            weights.update(_layer(ours, prefix, theirs, size, rank))
            norm = f"{prefix}{NORM}"  # between the maps of the example's experts
            for key in [key for key in ours if within == EXAMPLE and key.startswith(norm)]:
                outside = prefix.removesuffix(within) + "ffn_layernorm."
                weights[outside + key.removeprefix(norm)] = ours[key]
    return weights


def _layer(
    ours: Weights, prefix: str, theirs: str, size: int, rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one layer's weights of a rank, in Tutel's order and under Tutel's prefix."""
    own = {name.removeprefix(prefix): t for name, t in ours.items() if name.startswith(prefix)}
    experts = {
        name.removeprefix("experts."): tensor
        for name, tensor in own.items()
        if name.startswith("experts.")
        and not (theirs.endswith("moe_ffn.") and name.startswith(NORM))
    }
    yield f"{theirs}{COUNT}", torch.tensor(next(iter(experts.values())).shape[0])
    try:
        found = tutel_experts(experts, size, rank)
    except ValueError as error:
        raise ValueError(
            f"--input has the layer {prefix.rstrip('.')} that {error}; give a model without it."
        ) from error
    for key, tensor in found.items():
        yield f"{theirs}experts.{key}", tensor
    for name, tensor in own.items():
        gate = re.fullmatch(r"(?:gate|other_gates\.(\d+))\.(.+)", name)
        if gate is not None:
            key, value = tutel_gate(gate[2], tensor)
            yield f"{theirs}gates.{int(gate[1]) + 1 if gate[1] else 0}.{key}", value
        elif not name.startswith("experts."):
            raise ValueError(
                f"--input has {prefix}{name}, which Tutel's layer has not; give a model without it."
            )
