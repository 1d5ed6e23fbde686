"""Converts files that ranks saved of a model with Tutel's moe_layer into one file.

A state dict becomes one for a model with fairseq_tutel.moe_layer with the same arguments. A checkpoint of
Tutel's fairseq example becomes one of moe_transformer_lm or moe_transformer. Weights keep their bits.
"""

import re
from pathlib import Path
from typing import Any

import torch

from fairseq_tutel.checkpoint.files import read_file
from fairseq_tutel.checkpoint.malformed import refuse_weights
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert import tutel_fairseq
from fairseq_tutel.convert.tutel_names import Tensors, our_experts, our_gates

FLAG = "--input-prefix"
COUNT = "_num_global_experts"
LAYERS = ("moe_layer", "MoELayer")


def rank_file(pattern: str, rank: int, size: int) -> Path:
    """Return the file of a rank: {rank} and {size} are filled in, or RANK-of-SIZE is added."""
    if "{rank}" not in pattern:
        pattern += "{rank}-of-{size}"
    return Path(pattern.replace("{rank}", str(rank)).replace("{size}", str(size)))


def from_tutel(
    paths: list[Path],
    namespace: str | None = None,
    default_experts: int | None = None,
    layer: str = LAYERS[0],
    activation: str = "linear",
) -> tuple[Any, list[str]]:
    """Join the files of all ranks; return the content of one file, and notes as sentences.

    Args:
        paths: the file of each rank.
        namespace: keys of the weights in a file, joined by /; None for the usual ones.
        default_experts: number of experts per layer for files that lack it.
        layer: class of the layers of a state dict here, one of LAYERS.
        activation: activation of the experts of a fairseq checkpoint.

    Raises:
        ValueError: a file is missing or corrupt, or the files do not fit together.
    """
    ranks, state, keys = _open_ranks(paths, namespace)
    layers = _layer_counts(ranks, default_experts)
    in_example = keys == ["model"] and bool(state.get("cfg") or state.get("args"))
    prefix = "moe." * (layer == LAYERS[0] and not in_example)
    weights, notes = _joined(ranks, layers, prefix)
    state = _with_weights(state, keys, weights)
    if in_example:
        saved = SavedModel(state, flag=FLAG)
        notes += tutel_fairseq.to_ours(saved, layers, activation)
    elif keys:
        notes += _leave_out(state, keys[0], "its tensors are those of rank 0")
    return state, notes


def _open_ranks(paths: list[Path], namespace: str | None) -> tuple[list[Tensors], Any, list[str]]:
    """Open the files of all ranks; their tensors are mapped.

    Returns:
        The weights of every rank, the content of rank 0's file, and the keys of the weights in it.

    Raises:
        ValueError: a file is missing or corrupt, or lacks a weight that another has.
    """
    ranks: list[Tensors] = []
    for path in paths:
        state = read_file(path, FLAG)
        weights, found = _weights_in(state, path, namespace)
        refuse_weights(weights, f"{FLAG} {path}")
        if not ranks:
            first, keys = state, found
        ranks.append(weights)
        for name in ranks[0].keys() ^ weights.keys():
            lacking = path if name in ranks[0] else paths[0]
            raise ValueError(f"{FLAG} names {lacking}, which lacks {name}; give the files of one model.")
    return ranks, first, keys


def _weights_in(state: Any, path: Path, namespace: str | None) -> tuple[Tensors, list[str]]:
    """Return the weights in a file, and the keys that lead to them.

    Args:
        state: content of the file.
        path: the file.
        namespace: keys joined by /; None for `model` if it exists, else the file itself.

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


def _layer_counts(ranks: list[Tensors], default: int | None) -> dict[str, int]:
    """Return the number of experts of each of Tutel's layers, by the prefix of its names.

    Raises:
        ValueError: there are none, their number is unknown, or ranks do not fit it.
    """
    layers: dict[str, int] = {}
    for name, tensor in ranks[0].items():
        if name.rpartition(".")[2] == COUNT:
            layers[name.removesuffix(COUNT)] = int(tensor)
            if any(int(rank[name]) != int(tensor) for rank in ranks):
                raise ValueError(f"{FLAG} has ranks that differ in {name}; give the files of one model.")
        elif default is not None:
            found = re.fullmatch(r"(|.+\.)experts\.(?:batched_fc1_w|W_fc1)", name)
            if found is not None:
                layers.setdefault(found[1], default)
    if not layers:
        raise ValueError(
            f"{FLAG} has no layer of Tutel's ({COUNT}); files of an older Tutel need "
            "--default-num-global-experts."
        )
    for prefix, experts in layers.items():
        if experts < 1 or (experts % len(ranks) and len(ranks) % experts):
            raise ValueError(
                f"--input-size is {len(ranks)}, but {prefix.rstrip('.') or 'the layer'} has {experts} "
                "experts, which this number of ranks cannot hold; give the number of ranks that saved."
            )
    return layers


def _joined(ranks: list[Tensors], layers: dict[str, int], within: str) -> tuple[Tensors, list[str]]:
    """Return all weights under our names, and a note if weights outside experts differ between ranks.

    Args:
        ranks: the weights of every rank; those outside MoE layers are taken from rank 0.
        layers: number of experts of each layer, by its prefix.
        within: what follows the prefix in our names.

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
        ValueError: the ranks do not hold all experts; the text continues the name of the layer.
    """
    own = {name.removeprefix(prefix): t for name, t in ranks[0].items() if name.startswith(prefix)}
    gates = our_gates(own)
    widths = [gates[key].shape[1] for key in ("gate.weight", "gate.projection_weight") if key in gates]
    experts = [name for name in own if name.startswith("experts.")]
    if not experts:
        raise ValueError("lacks its experts")
    parts = {name.removeprefix("experts."): [rank[prefix + name] for rank in ranks] for name in experts}
    whole = our_experts(parts, num_experts, widths[0] if widths else None)
    return {**gates, **{f"experts.{key}": tensor for key, tensor in whole.items()}}


def _with_weights(state: Any, keys: list[str], weights: Tensors) -> Any:
    """Return a shallow copy of a file's content with other weights."""
    if not keys:
        return weights
    return {**state, keys[0]: _with_weights(state[keys[0]], keys[1:], weights)}


def _leave_out(state: dict[str, Any], kept: str, why: str) -> list[str]:
    """Remove all keys that lead to tensors, except one; return a sentence for each."""
    dropped = [key for key, value in state.items() if key != kept and _has_tensor(value)]
    for key in dropped:
        del state[key]
    return [f"{key} is left out: {why}." for key in dropped]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_has_tensor, value.values() if isinstance(value, dict) else value))
    return torch.is_tensor(value)
