"""Converts a checkpoint: removes layers, enables pre-gating, or extracts the members of an ensemble."""

import argparse
import copy
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint.saved import PARTS, Layer, SavedModel, Weights, write_all
from fairseq_tutel.convert.command import NEW_RUN
from fairseq_tutel.convert.configs import configs_of, counts_text, freq_of
from fairseq_tutel.inference.pregate import refuse_too_far
from fairseq_tutel.option import flag_of, options_in
from fairseq_tutel.plugin.ensemble_options import CMCLConfig, EnsembleConfig
from fairseq_tutel.plugin.feed_forward import SIDES
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.tools.arguments import refuse_output

ENSEMBLE = "ensemble_of"


def student(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert student`."""
    saved = SavedModel.open(inputs[0])
    sides = sides_of(saved)
    kept = _kept(arguments, {side: len(layers) for side, layers in sides.items()})
    changed = keep_layers(saved, kept)
    for side, layers in sides.items():
        numbers = ", ".join(map(str, kept[side]))
        print(f"{side}: {len(kept[side])} of {len(layers)} layers: {numbers}")
    words = " ".join(f"{flag_of(key)} {value}" for key, value in changed.items() if value is not None)
    saved.write(output)
    return f"{NEW_RUN}, with --finetune-from-model and {words}"


def _kept(arguments: argparse.Namespace, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Parse options that remove layers, and return the remaining layers of encoder and decoder."""
    main = "decoder" if "decoder" in sizes else "encoder"
    kept = {side: list(range(size)) for side, size in sizes.items()}
    for flag, side in (("--drop-layers", main), ("--encoder-drop-layers", "encoder")):
        text = getattr(arguments, flag[2:].replace("-", "_"))
        if text is None:
            continue
        size = sizes.get(side, 0)
        named = {int(part) if part.strip().isdecimal() else -1 for part in text.split(",")}
        kept[side] = [i for i in range(size) if i not in named]
        if not named <= {*range(size)} or not kept[side]:
            raise ValueError(
                f"{flag} is {text!r}, but the {side} has {size} layers; give some of their numbers from 0 "
                "on, but not all, separated by commas, such as 1,3."
            )
    if all(len(kept[side]) == size for side, size in sizes.items()):
        raise ValueError("no layer would be removed; give --drop-layers or --encoder-drop-layers.")
    return kept


def pregate(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert pregate`."""
    saved, ahead = SavedModel.open(inputs[0]), arguments.moe_pregate
    for line in enable_pregating(saved, ahead):
        print(line)
    saved.write(output)
    return f"; fine-tune it with --finetune-from-model and --moe-pregate {ahead}"


def members(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert members`."""
    saved = SavedModel.open(inputs[0])
    if saved.name("model") != ENSEMBLE:
        raise ValueError(
            f"INPUT names {saved.path}, a checkpoint of {saved.name('model') or 'an unknown model'}; "
            f"give a checkpoint of --arch {ENSEMBLE}."
        )
    paths = [output / f"member{m}.pt" for m in range(int(saved.options["ensemble_size"]))]
    output.mkdir(exist_ok=True)
    for path in paths:
        refuse_output(path, inputs, arguments.overwrite)
    write_all((path, _member(saved, m).state) for m, path in enumerate(paths))
    text = f"/member0.pt to {paths[-1].name}: {saved.options['ensemble_arch']}{NEW_RUN}"
    if layer := saved.options.get("ensemble_share_after"):
        text += f"\ntheir outputs differ from the ensemble, in which members shared the features of {layer}"
    return text


def sides_of(saved: SavedModel) -> dict[str, list[Layer]]:
    """Return the layers of a transformer as a dictionary with the keys "encoder" and "decoder".

    Raises:
        ValueError: the model is not a transformer.
    """
    sides = {side: list(layers) for side, layers in groupby(saved.layers, lambda one: one.side)}
    if not sides or not sides.keys() <= {*SIDES}:  # A Swin model has stages instead.
        raise ValueError(
            f"INPUT names {saved.path}, which has no encoder or decoder layers; give a transformer."
        )
    return sides


def keep_layers(saved: SavedModel, kept: Mapping[str, Collection[int]]) -> dict[str, Any]:
    """Remove all layers of a checkpoint except `kept`, in place, and return the changed options.

    Raises:
        ValueError: no MoE layer remains, or no --moe-freq selects the remaining MoE layers.
    """
    options, sides = saved.options, sides_of(saved)
    changes: dict[str, Any] = {}
    left: dict[str, list[Layer]] = {}
    for side, layers in sides.items():
        left[side] = [layer for layer in layers if layer.index in kept[side]]
        changes |= _options_of(side, layers, left[side], options, alone=len(sides) == 1)
    moe = {side: [layer for layer in layers if layer.has_experts] for side, layers in left.items()}
    counts = [saved.num_experts(layer) for layers in moe.values() for layer in layers]
    if counts:
        changes["moe_expert_count"] = counts_text(counts)
    elif any(layer.has_experts for layer in saved.layers):
        raise ValueError(
            "no layer with experts would be left; keep at least one such layer (`convert dense` makes a "
            "dense model)."
        )
    if options.get("moe_pregate"):
        refuse_too_far(options["moe_pregate"], {side: len(own) for side, own in moe.items() if own})
    changed = {key: value for key, value in changes.items() if options.get(key) != value}
    weights = _renumbered(saved, left)
    options.update(changes)
    saved.restart(weights)
    return changed


def _options_of(
    side: str, layers: Sequence[Layer], left: Sequence[Layer], options: Mapping[str, Any], alone: bool
) -> dict[str, Any]:
    """Return new values for the options that describe the remaining layers of an encoder or a decoder."""
    found: dict[str, Any] = {f"{side}_layers": len(left)}
    if options.get(f"{side}_layers_to_keep"):
        found[f"{side}_layers_to_keep"] = None
    if not any(layer.has_experts for layer in layers):
        return found
    # The value -1 of --encoder-moe-freq or --decoder-moe-freq means that --moe-freq applies.
    own = f"{side}_moe_freq"
    before = options.get(own, -1) if not alone else -1
    before = options.get("moe_freq", 0) if before == -1 else before
    places = [i for i, layer in enumerate(left) if layer.has_experts]
    freq = freq_of(places, len(left), before)
    if freq is None:
        raise ValueError(
            f"of the {len(left)} {side} layers that would be left, {', '.join(map(str, places))} (counted "
            "from 0) would have experts, but no --moe-freq F selects these layers: it selects the last of "
            "every F layers; remove other layers."
        )
    if freq != before:
        found["moe_freq" if alone else own] = freq
    return found


def _renumbered(saved: SavedModel, left: Mapping[str, Sequence[Layer]]) -> Weights:
    """Return the model's tensors without those of removed layers; renumber the remaining layers."""
    new: dict[str, str | None] = {layer.name: None for layer in saved.layers}
    for layers in left.values():
        new |= {layer.name: f"{layer.name.rpartition('.')[0]}.{i}" for i, layer in enumerate(layers)}
    found: Weights = {}
    for key, tensor in saved.weights.items():
        old = next((name for name in new if key.startswith(f"{name}.")), None)
        if old is None:
            found[key] = tensor
        elif new[old] is not None:
            found[f"{new[old]}{key.removeprefix(old)}"] = tensor
    return found


def enable_pregating(saved: SavedModel, ahead: int) -> list[str]:
    """Enable pre-gating in a checkpoint: each gate reads the input of an earlier MoE layer.

    The option --moe-pregate is set, and no weight changes (see inference/pregate.py). The function returns
    one line per MoE layer, which names the input of the layer's gate.

    Raises:
        ValueError: the model is pre-gated already, or has too few MoE layers.
    """
    sides = [list(layers) for _, layers in groupby(configs_of(saved), lambda layer: layer.side)]
    if saved.options.get("moe_pregate"):
        raise ValueError(
            f"INPUT names {saved.path}, which is pre-gated already (--moe-pregate "
            f"{saved.options['moe_pregate']}); give a checkpoint without pre-gating."
        )
    refuse_too_far(ahead, {layers[0].side: len(layers) for layers in sides})
    lines = []
    for layers in sides:
        for i, layer in enumerate(layers):
            source = "its own input" if i < ahead else f"the input of {layers[i - ahead].label}"
            lines.append(f"{layer.label}: its gate reads {source}")
    saved.options["moe_pregate"] = ahead
    saved.restart()
    return lines


def _member(saved: SavedModel, number: int) -> SavedModel:
    """Return one member of an ensemble as a checkpoint, with the options of an ordinary model."""
    plugin.register()
    from fairseq.models import ARCH_MODEL_REGISTRY

    prefix, left_out = f"members.{number}.", ("model", "last_optimizer_state")
    rest = {key: value for key, value in saved.state.items() if key not in left_out}
    made = SavedModel(copy.deepcopy(rest))
    made.restart({k.removeprefix(prefix): t for k, t in saved.weights.items() if k.startswith(prefix)})
    arch, criterion = made.options["ensemble_arch"], made.name("criterion")
    model_class = ARCH_MODEL_REGISTRY.get(arch)
    if criterion.removeprefix("moe_") == "cmcl":
        images = "image_classification"  # The task and the criterion have this name.
        stock = images if made.name("task").removeprefix("moe_") == images else "cross_entropy"
        made.rename("criterion", criterion.replace("cmcl", stock))
    made.rename("model", arch)
    keys = [option.key for table in (EnsembleConfig, CMCLConfig) for option in options_in(table)]
    if not getattr(model_class, "has_experts", False):
        keys += [option.key for part in ("task", "criterion") for option in options_of(part)]
        for part in PARTS:
            made.rename(part, made.name(part).removeprefix("moe_"))
        made.use_plain_options()
    made.drop(keys)
    return made
