"""Removes layers of a checkpoint, for a student of distillation."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.saved import Layer, SavedModel
from fairseq_tutel.convert.configs import counts_text
from fairseq_tutel.inference.pregate import refuse_too_far
from fairseq_tutel.plugin.feed_forward import SIDES, chosen_layers


def sides_of(saved: SavedModel) -> dict[str, list[Layer]]:
    """Return the layers of each side of a transformer.

    Raises:
        ValueError: it is no transformer.
    """
    sides = {side: list(layers) for side, layers in groupby(saved.layers, lambda one: one.side)}
    if not sides or not sides.keys() <= {*SIDES}:  # Swin has stages
        raise ValueError(
            f"--input names {saved.path}, which has no layers of an encoder or a decoder; give another."
        )
    return sides


def keep_layers(saved: SavedModel, kept: Mapping[str, Collection[int]]) -> dict[str, Any]:
    """Remove all other layers of a checkpoint, in place.

    Args:
        saved: a checkpoint, dense or with experts.
        kept: numbers of the layers to keep, by side; all layers of other sides stay.

    Returns:
        The options that changed.

    Raises:
        ValueError: no MoE layer is left, or no --moe-freq gives the MoE layers that are.
    """
    sides, options = sides_of(saved), saved.options
    left = {
        side: [layer for layer in layers if side not in kept or layer.index in kept[side]]
        for side, layers in sides.items()
    }
    changes: dict[str, Any] = {}
    for side, layers in sides.items():
        changes |= _options_of(side, layers, left[side], options, alone=len(sides) == 1)
    moe = {side: [layer for layer in layers if layer.has_experts] for side, layers in left.items()}
    counts = [saved.num_experts(layer) for layers in moe.values() for layer in layers]
    if counts:
        changes["moe_expert_count"] = counts_text(counts)
    elif any(layer.has_experts for layer in saved.layers):
        raise ValueError(
            "no layer with experts would be left; leave one (convert dense makes a dense model)."
        )
    if options.get("moe_pregate"):
        chains = {side: len(layers) for side, layers in moe.items() if layers}
        refuse_too_far(options["moe_pregate"], chains)
    changed = {key: value for key, value in changes.items() if options.get(key) != value}
    weights = _renumbered(saved, left)
    options.update(changes)
    saved.restart(weights)
    return changed


def _options_of(
    side: str,
    layers: Sequence[Layer],
    left: Sequence[Layer],
    options: Mapping[str, Any],
    alone: bool,
) -> dict[str, Any]:
    """Return the options of a side with the remaining layers."""
    found: dict[str, Any] = {f"{side}_layers": len(left)}
    if options.get(f"{side}_layers_to_keep"):
        found[f"{side}_layers_to_keep"] = None
    if not any(layer.has_experts for layer in layers):
        return found
    # A side's own --moe-freq is -1 if it has the common one.
    own = f"{side}_moe_freq"
    before = options.get(own, -1) if not alone else -1
    before = options.get("moe_freq", 0) if before == -1 else before
    places = [i for i, layer in enumerate(left) if layer.has_experts]
    freqs = [before, *range(len(left) + 1)]
    fitting = [freq for freq in freqs if chosen_layers(range(len(left)), freq) == places]
    if not fitting:
        numbers = ", ".join(map(str, places))
        raise ValueError(
            f"of the {len(left)} {side} layers that would be left, those with experts would be {numbers} "
            "(from 0), which no --moe-freq F gives: it is the last of every F layers; remove others."
        )
    if fitting[0] != before:
        found["moe_freq" if alone else own] = fitting[0]
    return found


def _renumbered(saved: SavedModel, left: Mapping[str, Sequence[Layer]]) -> dict[str, Tensor]:
    """Return the remaining tensors under their new names."""
    names = {
        layer.name: f"{layer.name.rpartition('.')[0]}.{left[layer.side].index(layer)}"
        if layer in left[layer.side]
        else None
        for layer in saved.layers
    }
    found = {}
    for key, tensor in saved.weights.items():
        old = next((name for name in names if key.startswith(f"{name}.")), None)
        if old is None:
            found[key] = tensor
        elif (new := names[old]) is not None:
            found[f"{new}{key.removeprefix(old)}"] = tensor
    return found
