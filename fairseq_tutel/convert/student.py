"""convert student: a checkpoint with fewer layers, to begin a student that learns from the whole one.

Layers are counted from 0 within their side. What is left computes what it did, on other inputs.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.inference.pregate import refuse_too_far
from fairseq_tutel.moe.options import flag_of
from fairseq_tutel.plugin.feed_forward import SIDES, chosen_layers
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.checkpoint.reading import begun_anew, load, write
from fairseq_tutel.checkpoint.saved import Layer, counts_text, experts_of, layers_of
from fairseq_tutel.convert.names import model_options

STUDENT = """
convert student: leave layers out of a checkpoint, dense or with experts. Train the new one by
--finetune-from-model, with the options that are printed; --criterion moe_distillation lets it learn from
the whole one. --moe-freq says which layers have experts, so those that are left must be every so many-th.
"""


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    text = "leave layers out"
    parser = add_conversion(
        kinds, "student", convert, text, STUDENT, "a checkpoint, dense or with experts"
    )
    for side, prefix in (("decoder's, or of the only side", ""), ("encoder's", "encoder-")):
        which = parser.add_mutually_exclusive_group()
        for verb in ("drop", "keep"):
            text = f"the {side} layers to {verb}, as 1,3"
            which.add_argument(f"--{prefix}{verb}-layers", metavar="LAYERS", help=text)


def convert(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    """Convert as the command line says."""
    state = load(path, "--input")
    options = model_options(state)
    stacks = {
        side: list(layers)
        for side, layers in groupby(layers_of(state["model"]), lambda layer: layer.side)
    }
    if not stacks or not stacks.keys() <= {*SIDES}:  # swin's layers stand in stages
        raise ValueError(
            f"--input names {path}, which has no layers of an encoder or a decoder; give another."
        )
    kept = _kept(arguments, stacks)
    changes: dict[str, Any] = {}
    for side, layers in stacks.items():
        changes |= _options_of(side, layers, kept[side], options, alone=len(stacks) == 1)
    model = _renumbered(state["model"], stacks, kept)
    with_experts = {
        side: [layer for layer in layers if layer.has_experts] for side, layers in kept.items()
    }
    counts = [
        len(next(iter(experts_of(state["model"], layer).values())))
        for layers in with_experts.values()
        for layer in layers
    ]
    if counts:
        changes["moe_expert_count"] = counts_text(counts)
    elif any(layer.has_experts for layers in stacks.values() for layer in layers):
        raise ValueError(
            "no layer with experts would be left; leave one (convert dense makes a dense model)."
        )
    if options.get("moe_pregate"):
        chains = {side: len(layers) for side, layers in with_experts.items() if layers}
        refuse_too_far(options["moe_pregate"], chains)
    changed = {key: value for key, value in changes.items() if options.get(key) != value}
    options.update(changes)
    write(begun_anew({**state, "model": model}), output)
    for side, layers in kept.items():
        numbers = ", ".join(str(layer.index) for layer in layers)
        print(f"{side}: {len(layers)} of {len(stacks[side])} layers: {numbers}")
    words = " ".join(
        f"{flag_of(key)} {value}" for key, value in changed.items() if value is not None
    )
    print(f"wrote {output}; a training begins anew with it, by --finetune-from-model, with {words}")


def _kept(
    arguments: argparse.Namespace, stacks: Mapping[str, Sequence[Layer]]
) -> dict[str, list[Layer]]:
    """Return the layers that are left of each side, in order.

    Raises:
        ValueError: no layer is left out, or none of a side is left, or one is named that there is not.
    """
    main = "decoder" if "decoder" in stacks else "encoder"
    kept = {side: list(layers) for side, layers in stacks.items()}
    for prefix, side in (("", main), ("encoder_", "encoder")):
        for verb in ("drop", "keep"):
            text = getattr(arguments, f"{prefix}{verb}_layers")
            if text is None:
                continue
            flag = flag_of(f"{prefix}{verb}_layers")
            if prefix and len(stacks) == 1:
                raise ValueError(
                    f"{flag} is {text}, but the model has one side; give {flag_of(verb)}-layers."
                )
            named = _numbers(flag, text, len(stacks[side]), side)
            kept[side] = [
                layer for layer in stacks[side] if (layer.index in named) == (verb == "keep")
            ]
            if not kept[side]:
                raise ValueError(
                    f"{flag} is {text}, which leaves no layer of the {side}; leave one."
                )
    if all(len(kept[side]) == len(layers) for side, layers in stacks.items()):
        raise ValueError(
            "no layer would be left out; give --drop-layers, --keep-layers, or those of the encoder."
        )
    return kept


def _numbers(flag: str, text: str, count: int, side: str) -> set[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{flag} is {text!r}; give numbers of layers with commas between, as 1,3.")
    named = {int(part) for part in parts}
    if max(named) >= count or len(named) < len(parts):
        raise ValueError(
            f"{flag} is {text}, but the {side} has the layers 0 to {count - 1}; name some of these, once "
            "each."
        )
    return named


def _options_of(
    side: str,
    layers: Sequence[Layer],
    kept: Sequence[Layer],
    options: Mapping[str, Any],
    alone: bool,
) -> dict[str, Any]:
    """Return a side's options as they are with the layers that are left.

    Raises:
        ValueError: no --moe-freq puts experts where they would be.
    """
    found: dict[str, Any] = {f"{side}_layers": len(kept)}
    if options.get(f"{side}_layers_to_keep"):
        found[f"{side}_layers_to_keep"] = None
    if not any(layer.has_experts for layer in layers):
        return found
    # Of a side its own --moe-freq, or -1 for that of both.
    own = f"{side}_moe_freq"
    key = "moe_freq" if alone else own
    before = options.get(own, -1) if not alone else -1
    before = options.get("moe_freq", 0) if before == -1 else before
    places = [i for i, layer in enumerate(kept) if layer.has_experts]
    freqs = [before, *range(len(kept) + 1)]
    fitting = [freq for freq in freqs if chosen_layers(range(len(kept)), freq) == places]
    if not fitting:
        numbers = ", ".join(map(str, places))
        raise ValueError(
            f"of the {len(kept)} {side} layers that would be left, those with experts would be {numbers} "
            "(from 0), which no --moe-freq F gives: it is the last of every F layers; leave out others."
        )
    if fitting[0] != before:
        found[key] = fitting[0]
    return found


def _renumbered(
    model: Mapping[str, Tensor],
    stacks: Mapping[str, Sequence[Layer]],
    kept: Mapping[str, Sequence[Layer]],
) -> dict[str, Tensor]:
    """Return the tensors of the layers that are left, under their new numbers, and all others."""
    names = {
        layer.name: f"{layer.name.rpartition('.')[0]}.{kept[side].index(layer)}"
        if layer in kept[side]
        else None
        for side, layers in stacks.items()
        for layer in layers
    }
    found = {}
    for key, tensor in model.items():
        of_layer = next((name for name in names if key.startswith(f"{name}.")), None)
        new = of_layer and names[of_layer]
        if of_layer is None or new is not None:
            found[key if of_layer is None else f"{new}{key.removeprefix(of_layer)}"] = tensor
    return found
