"""Converts a Mixture-of-Experts checkpoint to a folder in the format of Hugging Face, tensor by tensor."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_tutel.checkpoint.saved import Layer, SavedModel
from fairseq_tutel.checkpoint.shards import ShardedExpert, ShardedTensor
from fairseq_tutel.convert.configs import configs_of, counts_text, freq_of
from fairseq_tutel.convert.released import to_hf
from fairseq_tutel.convert.released.families.nllb_moe import NLLB_MOE, MoEFamily
from fairseq_tutel.moe.config import LAYER, MoEConfig
from fairseq_tutel.plugin.feed_forward import SIDES


def convert(saved: SavedModel, output: Path, limit: int, tokenizer: Path | None = None) -> str:
    """Write a checkpoint with experts to a folder in the format of Hugging Face.

    Args:
        saved: the open checkpoint; its experts may be in shard files.
        output: the folder to write.
        limit: maximum number of bytes of a weight file.
        tokenizer: folder with the tokenizer files to copy.

    Returns:
        The name of the class.

    Raises:
        ValueError: the model has no counterpart, or the folder could not be written.
    """
    family: MoEFamily = NLLB_MOE
    options = _options(saved)
    config = family.write_options(options)
    layers = family.moe_layers(options)
    rows = [row for layer in layers for row in family.expert_rows(layer, config["num_experts"])]
    stacks = {row.stack for row in rows}
    for stack in stacks:
        if stack not in saved.weights:
            raise ValueError(
                f"{saved.flag} lacks the tensor {stack} of a {family.architectures[0]}; give a checkpoint "
                "whose experts have biases."
            )
    dense = {name: tensor for name, tensor in saved.weights.items() if name not in stacks}
    weights: dict[str, Any] = to_hf.weights_of(dense, family, options)
    config |= to_hf.written_last(saved, family, weights)
    weights |= {row.theirs: _expert(saved.weights[row.stack], row.expert) for row in rows}
    to_hf.write(output, weights, config, limit, tokenizer)
    return family.architectures[0]


def _expert(stack: Tensor | ShardedTensor, expert: int) -> Tensor | ShardedExpert:
    return ShardedExpert(stack, expert) if isinstance(stack, ShardedTensor) else stack[expert]


def _options(saved: SavedModel) -> dict[str, Any]:
    """Return the model's options in the form that the family's table has.

    Older names of options and options for both sides are replaced by the options that they set.
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
    """Return the options of the layers of a side: which of them have experts, and their width.

    Raises:
        ValueError: transformers cannot express these layers.
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
