"""tutel: what ranks saved of a model with Tutel's moe_layer as one file of ours.

A state dict, for a model whose layers are fairseq_tutel.moe_layer with the same arguments; or a checkpoint
of Tutel's fairseq example, as one of moe_transformer_lm or moe_transformer. Weights stay as they are, bit
for bit.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.moe.config import ACTIVATIONS
from fairseq_tutel.tools.arguments import add_overwrite, output_path, refuse_output
from fairseq_tutel.convert import tutel_fairseq
from fairseq_tutel.checkpoint.reading import load_any, write
from fairseq_tutel.convert.tutel_names import Tensors, our_experts, our_gates

FLAG = "--input-prefix"
COUNT = "_num_global_experts"
LAYERS = ("moe_layer", "MoELayer")


def add_to(kinds: Any) -> None:
    """Add this conversion to the command line."""
    parser = kinds.add_parser(
        "tutel",
        help="from Tutel",
        description="Write what ranks saved of a model with Tutel's moe_layer as one file of ours: a state "
        "dict, for a model whose layers are fairseq_tutel.moe_layer with the same arguments; or a "
        "checkpoint of Tutel's fairseq example, as one of moe_transformer_lm or moe_transformer.",
    )
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
    parser.add_argument(
        "--namespace",
        metavar="KEYS",
        help="keys that lead to the weights in a file, joined by / [model, where there is one]",
    )
    parser.add_argument(
        "--layer",
        choices=LAYERS,
        default=LAYERS[0],
        help="class of ours that the layers of a state dict will be of [moe_layer]",
    )
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


def rank_file(pattern: str, rank: int, size: int) -> Path:
    """Return the file of a rank: {rank} and {size} are filled in, or RANK-of-SIZE is added."""
    if "{rank}" not in pattern:
        pattern += "{rank}-of-{size}"
    return Path(pattern.replace("{rank}", str(rank)).replace("{size}", str(size)))


def weights_in(state: Any, path: Path, namespace: str | None) -> tuple[Tensors, list[str]]:
    """Return the weights in a file, and the keys that lead to them.

    Args:
        state: what the file holds.
        path: of the file.
        namespace: keys joined by /; None for `model` where there is one, else the file itself.

    Raises:
        ValueError: there are none.
    """
    if namespace is None:
        has_model = isinstance(state, dict) and isinstance(state.get("model"), dict)
        namespace = "model" if has_model else ""
    keys, found = [key for key in namespace.split("/") if key], state
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not any(torch.is_tensor(value) for value in found.values()):
        raise ValueError(
            f"{FLAG} names {path}, which holds no weights{f' under {namespace}' if keys else ''}; give "
            "--namespace the keys that lead to them, joined by /."
        )
    return found, keys


def with_weights(state: Any, keys: list[str], weights: Tensors) -> Any:
    """Return what a file holds with other weights; the rest is shared."""
    if not keys:
        return weights
    return {**state, keys[0]: with_weights(state[keys[0]], keys[1:], weights)}


def leave_out(state: dict[str, Any], kept: str, why: str) -> list[str]:
    """Take out the keys that lead to tensors, but one, in place; return a sentence for each."""
    dropped = [key for key, value in state.items() if key != kept and _has_tensor(value)]
    for key in dropped:
        del state[key]
    return [f"{key} is left out: {why}." for key in dropped]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_has_tensor, value.values() if isinstance(value, dict) else value))
    return torch.is_tensor(value)


def is_example(state: Any, keys: list[str]) -> bool:
    """Return whether a file whose weights are under `keys` is a fairseq checkpoint."""
    return keys == ["model"] and bool(state.get("cfg") or state.get("args"))


def convert(arguments: argparse.Namespace) -> None:
    """Convert what ranks with Tutel saved.

    Raises:
        ValueError: naming what is wrong and the fix.
    """
    pattern, size = arguments.input_prefix, arguments.input_size
    output = output_path(arguments.output)
    if size < 1:
        raise ValueError(
            f"--input-size is {size}; give the number of ranks that saved, at least 1."
        )
    paths = [rank_file(pattern, rank, size) for rank in range(size)]
    if size == 1 and Path(pattern).is_file():
        paths = [Path(pattern)]
    ranks, state, keys = open_ranks(paths, arguments.namespace)
    refuse_output(output, paths, arguments.overwrite)
    layers = layer_counts(ranks, arguments.default_num_global_experts)
    in_example = is_example(state, keys)
    within = "moe." * (arguments.layer == LAYERS[0] and not in_example)
    weights, notes = ours_of(ranks, layers, within)
    state = with_weights(state, keys, weights)
    if in_example:
        notes += tutel_fairseq.to_ours(state, layers, arguments.expert_activation)
    elif keys:
        notes += leave_out(state, keys[0], "its tensors are rank 0's alone")
    write(state, output)
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {output}")


def open_ranks(paths: list[Path], namespace: str | None) -> tuple[list[Tensors], Any, list[str]]:
    """Open the files of all ranks; their tensors stay there until they are read.

    Returns:
        The weights of every rank, all of rank 0's file, and the keys that lead to the weights in it.

    Raises:
        ValueError: a file is missing, torn, or lacks a weight that another has.
    """
    ranks: list[Tensors] = []
    for path in paths:
        state = load_any(path, FLAG)
        weights, found = weights_in(state, path, namespace)
        if not ranks:
            first, keys = state, found
        ranks.append(weights)
        for name in ranks[0].keys() ^ weights.keys():
            lacking = path if name in ranks[0] else paths[0]
            raise ValueError(
                f"{FLAG} names {lacking}, which lacks {name}; give the files of one model."
            )
    return ranks, first, keys


def layer_counts(ranks: list[Tensors], default: int | None) -> dict[str, int]:
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
            raise ValueError(
                f"--input-size is {len(ranks)}, but {prefix.rstrip('.') or 'the layer'} has {experts} "
                "experts, which so many ranks cannot hold; give the number of ranks that saved."
            )
    return layers


def ours_of(ranks: list[Tensors], layers: dict[str, int], within: str) -> tuple[Tensors, list[str]]:
    """Return all weights under our names, with all experts, and what ranks should have alike and have not.

    Args:
        ranks: the weights of every rank; what is no layer's is rank 0's.
        layers: prefix of every layer, and its experts.
        within: what our names of a layer's weights have behind that prefix.

    Raises:
        ValueError: a layer lacks a weight, or has one of another size.
    """
    weights: Tensors = {}
    done: set[str] = set()
    differing: list[str] = []
    for name, tensor in ranks[0].items():
        own = ((p, name.removeprefix(p)) for p in layers if name.startswith(p))
        fits = (p for p, part in own if part == COUNT or part.startswith(("experts.", "gate")))
        prefix = next(fits, None)
        if prefix is None:
            weights[name] = tensor
        elif prefix not in done:
            done.add(prefix)
            try:
                found = our_layer(ranks, prefix, layers[prefix])
            except ValueError as error:
                raise ValueError(
                    f"{FLAG} has the layer {prefix.rstrip('.') or 'at the top'} that {error}; give the "
                    "files of one model."
                ) from error
            weights.update({prefix + within + key: value for key, value in found.items()})
        alike = torch.is_tensor(tensor) and not name.startswith(f"{prefix}experts.")
        if alike and any(not torch.equal(tensor, rank[name]) for rank in ranks[1:]):
            differing.append(name)
    if not differing:
        return weights, []
    what = f"{len(differing)} weights differ between ranks, such as {differing[0]}"
    return weights, [f"{what}; rank 0's are taken."]


def our_layer(ranks: list[Tensors], prefix: str, num_experts: int) -> Tensors:
    """Return one layer's weights under our names.

    Raises:
        ValueError: the ranks do not hold all experts; the text goes on from the name of the layer.
    """
    own = {name.removeprefix(prefix): t for name, t in ranks[0].items() if name.startswith(prefix)}
    gates = our_gates(own)
    widths = [
        gates[key].shape[1] for key in ("gate.weight", "gate.projection_weight") if key in gates
    ]
    experts = [name for name in own if name.startswith("experts.")]
    if not experts:
        raise ValueError("lacks its experts")
    parts = {
        name.removeprefix("experts."): [rank[prefix + name] for rank in ranks] for name in experts
    }
    whole = our_experts(parts, num_experts, widths[0] if widths else None)
    return {**gates, **{f"experts.{key}": tensor for key, tensor in whole.items()}}
