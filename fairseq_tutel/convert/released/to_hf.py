"""Converts a fairseq checkpoint to a folder in Hugging Face's format."""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import Layer, SavedModel, Weights
from fairseq_tutel.checkpoint.shards import ShardedExpert, ShardedTensor
from fairseq_tutel.convert.command import size_limit
from fairseq_tutel.convert.configs import configs_of, counts_text, freq_of
from fairseq_tutel.convert.released.families import FAMILIES
from fairseq_tutel.convert.released.families.nllb_moe import NLLB_MOE
from fairseq_tutel.convert.released.folder import CONFIG
from fairseq_tutel.convert.released.output import json_text, new_folder, write_text, write_weights
from fairseq_tutel.convert.released.table import Family
from fairseq_tutel.convert.released.vocabulary import TOKENIZER_FILES
from fairseq_tutel.moe.config import LAYER, MoEConfig
from fairseq_tutel.plugin.feed_forward import SIDES
from fairseq_tutel.tools.arguments import refuse_output_folder

LAYERS = ("encoder_layers", "decoder_layers")
# Names of fairseq tensors that are not weights.
BUFFERS = ("version", "_float_tensor")


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert to-hf`."""
    refuse_output_folder(output, inputs[0], CONFIG, arguments.overwrite)
    limit, tokenizer = size_limit(arguments), Path(arguments.tokenizer or inputs[0].parent)
    if not tokenizer.is_dir():
        raise ValueError(f"--tokenizer is {tokenizer}, which is not a folder; give an existing folder.")
    return f": {convert(SavedModel.open(inputs[0], keep_shards=True), output, limit, tokenizer)}"


def convert(saved: SavedModel, output: Path, limit: int, tokenizer: Path | None = None) -> str:
    """Write a checkpoint to a folder in Hugging Face's format, and return the name of the model class.

    Args:
        saved: the open checkpoint, whose experts may be in shard files.
        output: the folder to write.
        limit: the maximum number of bytes of a weight file.
        tokenizer: the folder with the tokenizer files to copy.

    Raises:
        ValueError: the model has no counterpart in transformers, or the folder cannot be written.
    """
    has_experts = any(layer.has_experts for layer in saved.layers)
    options = _moe_options(saved) if has_experts else saved.options
    family = NLLB_MOE if has_experts else _family(saved)
    config = family.write_options(options)
    weights = weights_of(saved.weights, family, options)
    config |= family.sizes(saved.weights) | family.write_more(saved.options_of("task") | saved.options)
    with new_folder(output) as made:
        write_weights(weights, made, limit)
        write_text(made / CONFIG, json_text(config | {"dtype": _dtype(weights)}))
        for file in TOKENIZER_FILES:
            if tokenizer is not None and (tokenizer / file).is_file():
                shutil.copyfile(tokenizer / file, made / file)
    return family.architectures[0]


def _family(saved: SavedModel) -> Family:
    """Return the dense model family that matches a checkpoint's options and tensors.

    Raises:
        ValueError: no family of models matches.
    """
    dense = [family for family in FAMILIES.values() if family is not NLLB_MOE]
    fitting, reasons = [], {}
    for family in dense:
        try:
            family.write_options(saved.options)
            weights_of(saved.weights, family, saved.options)
            fitting.append(family)
        except ValueError as error:
            reasons[family.name] = error
    if fitting:
        # Only the task distinguishes RoBERTa from XLM-RoBERTa.
        return min(fitting, key=lambda family: family.task != saved.name("task"))

    def distance(family: Family) -> tuple[int, int]:
        own = {option.ours for option in family.options}
        others = [key for key in LAYERS if (key in own) != (key in saved.options)]
        return len(others), len(family.differing(saved.options))

    closest = min(dense, key=distance).name
    raise ValueError(
        f"{saved.flag} is a {saved.name('model')}, which no class of transformers equals; the closest "
        f"family is {closest}: {reasons[closest]}"
    )


def weights_of(ours: Mapping[str, Any], family: Family, options: Mapping[str, Any]) -> Weights:
    """Return a checkpoint's tensors under transformers' names, with one name per tied tensor.

    Experts in shard files are returned as `ShardedExpert` objects.

    Raises:
        ValueError: a tensor is missing or has no counterpart in transformers.
    """
    found: Weights = {}
    used = {*family.constants, *family.unused}
    for row in family.rows(options):
        names = [name for name in row.ours if name in ours]
        if not names:
            raise ValueError(
                f"INPUT lacks the tensor {row.ours[0]} of a {family.architectures[0]}; give a checkpoint "
                "of such a model."
            )
        tensor: Tensor = ours[names[0]]
        for name in names[1:]:
            if ours[name] is not tensor and not torch.equal(ours[name], tensor):
                raise ValueError(
                    f"INPUT has different tensors {name} and {names[0]}, but a {family.architectures[0]} "
                    "has one tensor for both; this model cannot be converted."
                )
        found[row.theirs[0]] = tensor
        used |= {*names}
    for stack, (names, _) in family.stacks(options).items():
        if stack not in ours:
            raise ValueError(
                f"INPUT lacks the tensor {stack} of a {family.architectures[0]}; give a checkpoint whose "
                "experts have biases."
            )
        found |= {name: _expert(ours[stack], expert) for expert, name in enumerate(names)}
        used.add(stack)
    for name in ours:
        if name not in used and name.rpartition(".")[2] not in BUFFERS:
            raise ValueError(
                f"INPUT has the tensor {name}, which a {family.architectures[0]} does not have; this "
                "model cannot be converted."
            )
    sizes = family.sizes(ours)
    for name, shape in family.zeros.items():
        found[name] = torch.zeros([sizes.get(word) or int(word) for word in shape.split()])
    for summed, name in family.summed.items():
        found[name] = torch.zeros_like(ours[summed][:1])
    return found


def _expert(stack: Tensor | ShardedTensor, expert: int) -> Tensor | ShardedExpert:
    return ShardedExpert(stack, expert) if isinstance(stack, ShardedTensor) else stack[expert]


def _dtype(weights: Mapping[str, Any]) -> str:
    found = {tensor.dtype for tensor in weights.values() if tensor.dtype.is_floating_point}
    return str(found.pop()).removeprefix("torch.") if len(found) == 1 else "float32"


def _moe_options(saved: SavedModel) -> dict[str, Any]:
    """Return the model's options under the option names of the family's table.

    An option that sets other options, such as an option with an older name, is replaced by these options.
    """
    configs = configs_of(saved)
    config = next(iter(configs.values()))
    options = dict(saved.options)
    options |= {item.key: getattr(config, item.name) for item in LAYER.values() if item.of == "model"}
    options["no_moe_gating_use_fp32"] = not config.gate_fp32
    options["moe_expert_count"] = counts_text([each.num_experts for each in configs.values()])
    for side in SIDES:
        layers = [layer for layer in saved.layers if layer.side == side]
        options |= _options_of_side(side, layers, configs, options)
    return options


def _options_of_side(
    side: str, layers: list[Layer], configs: Mapping[Layer, MoEConfig], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fairseq options that give the MoE frequency and FFN width of an encoder or decoder.

    Raises:
        ValueError: transformers cannot express which layers have experts.
    """
    places = [i for i, layer in enumerate(layers) if layer.has_experts]
    freq = freq_of(places, len(layers))
    if freq is None:
        raise ValueError(
            f"INPUT has experts in the {side} layers {', '.join(map(str, places))}, but transformers has "
            "experts only in the last of every N layers (sparse steps)."
        )
    found = {f"{side}_moe_freq": freq}
    width = options[f"{side}_ffn_embed_dim"]
    for layer in layers:
        if layer.has_experts and (own := configs[layer].hidden_dim) != width:
            if len(places) < len(layers):
                raise ValueError(
                    f"INPUT has experts of width {own} in {layer.label} (--moe-expert-ffn-dim), but "
                    f"transformers has experts as wide as the dense layers, {width}."
                )
            found[f"{side}_ffn_embed_dim"] = own
    return found
