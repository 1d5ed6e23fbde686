"""Makes a dense checkpoint of one with experts."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from fairseq_tutel.checkpoint.saved import DENSE, LAYER_NORM, PARTS, Layer, SavedModel
from fairseq_tutel.convert.configs import Tensors, configs_of, replaced, without_experts
from fairseq_tutel.convert.upcycle import sums_to_1
from fairseq_tutel.moe.config import MoEConfig, label_of
from fairseq_tutel.moe.option_table import BY_OWNER, options_of
from fairseq_tutel.moe.slots import capacity_of
from fairseq_tutel.options.option import options_in
from fairseq_tutel.plugin.feed_forward import SIDES
from fairseq_tutel.vision.options import SwinExpertsConfig


def to_dense(
    saved: SavedModel, chosen: Mapping[Layer, Sequence[int]], weight: float | None = None
) -> tuple[dict[str, int], list[str]]:
    """Replace the experts of every MoE layer by one dense FFN, in place.

    Args:
        saved: a checkpoint with experts.
        chosen: IDs of the experts that become the FFN of each MoE layer, side by side.
        weight: total weight of the chosen experts. By default it is the sum of a token's weights where
            this is constant, else 1.

    Returns:
        The layers that got padding, with their width, and those whose outputs may change, by label.

    Raises:
        ValueError: experts that no dense FFN can represent.
    """
    made: dict[Layer, Tensors] = {}
    changed = []
    for layer, config in configs_of(saved).items():
        usual = config.routed_scaling_factor if sums_to_1(config) else 1.0
        total = usual if weight is None else weight
        made[layer] = _dense_ffn(saved, layer, config, chosen[layer], total)
        if total != usual or not _is_exact(saved, layer, config):
            changed.append(layer.label)
    made |= {layer: saved.dense_ffn(layer) for layer in saved.layers if not layer.has_experts}
    widths, padded = _pad(made)
    _use_dense_options(saved, widths)
    saved.restart(replaced(saved, made))
    return padded, changed


def _pad(made: dict[Layer, Tensors]) -> tuple[dict[str, int], dict[str, int]]:
    """Add hidden units of zeros, which stay 0, to the FFNs of each side up to one width.

    Returns:
        The sides' widths, and the widths of the padded layers by label.
    """
    widths: dict[str, int] = {}
    for layer, ffn in made.items():
        widths[layer.side] = max(widths.get(layer.side, 0), len(ffn["fc1.bias"]))
    padded = {}
    for layer, ffn in made.items():
        more = widths[layer.side] - len(ffn["fc1.bias"])
        if more and LAYER_NORM[0] in ffn:
            raise ValueError(
                "--input normalizes hidden layers (--scale-fc) of several widths, but those of a dense "
                "model have one width; choose --experts of one width."
            )
        if more:
            padded[layer.label] = widths[layer.side]
            ffn["fc1.weight"] = F.pad(ffn["fc1.weight"], (0, 0, 0, more))
            ffn["fc1.bias"] = F.pad(ffn["fc1.bias"], (0, more))
            ffn["fc2.weight"] = F.pad(ffn["fc2.weight"], (0, more))
    return widths, padded


def _use_dense_options(saved: SavedModel, widths: Mapping[str, int]) -> None:
    """Set the options and names of a dense fairseq model."""
    for part in PARTS:
        saved.rename(part, without_experts(saved.name(part)))
    saved.drop([option.key for owner in BY_OWNER for option in options_of(owner)])
    saved.drop([option.key for option in options_in(SwinExpertsConfig)])
    options = saved.options
    for side, width in widths.items():
        if side in SIDES:
            options[f"{side}_ffn_embed_dim"] = width
            continue
        dim, ratio = options["swin_embed_dim"], options["swin_mlp_ratio"]
        if width != int(dim * 2 ** int(side.partition(".")[2]) * ratio):
            raise ValueError(
                f"--experts makes the FFNs of {side} {width} wide, but a Swin's are {ratio:g} times as "
                "wide as its tokens (--swin-mlp-ratio); choose one expert of that width."
            )


def _dense_ffn(
    saved: SavedModel, layer: Layer, config: MoEConfig, chosen: Sequence[int], weight: float
) -> Tensors:
    """Return the tensors of the dense FFN; each expert's fc2 has an even share of the weight."""
    _refuse(config, layer, len(chosen))
    scale = weight / len(chosen)
    experts = [saved.expert(layer, i) for i in chosen]
    made = {}
    for name in DENSE:
        parts = [expert[name.replace(".", "_")] for expert in experts]
        if name.startswith("fc2") and scale != 1:
            parts = [part * scale for part in parts]
        if config.shared_experts:
            parts.append(saved.weights[f"{layer.moe}.beside.shared.{name}"])
        if name == "fc2.bias":
            made[name] = torch.stack(parts).sum(dim=0)
        else:
            made[name] = torch.cat(parts, dim=1 if name == "fc2.weight" else 0)
    for kind in ("weight", "bias") if config.hidden_layer_norm else ():
        norm = saved.weights[f"{layer.moe}.experts.hidden_layer_norm.{kind}"]
        made[f"ffn_layernorm.{kind}"] = norm
    return made


def _refuse(config: MoEConfig, layer: Layer, number: int) -> None:
    if config.expert_type != "ffn":
        raise ValueError(
            f"{layer.label} has experts of the type {config.expert_type} ({label_of('expert_type')}), for "
            "which fairseq has no dense layer; convert dense takes ffn."
        )
    if config.residual:
        raise ValueError(
            f"{layer.label} mixes experts and a dense network per token ({label_of('residual')}), which no "
            "dense layer can do; convert dense takes models without it."
        )
    if config.hidden_layer_norm and (number > 1 or config.shared_experts):
        raise ValueError(
            f"{layer.label} normalizes the hidden layer of each expert (--scale-fc), which a dense layer "
            "of several experts cannot do; choose one in --experts, of a model without shared experts."
        )


def _is_exact(saved: SavedModel, layer: Layer, config: MoEConfig) -> bool:
    """Whether the gate has no effect in evaluation: experts are equal, and their weights sum to 1."""
    if not sums_to_1(config) or config.choice == "experts" or config.prescore:
        return False
    return not capacity_of(config, training=False).is_limited and all(
        torch.equal(expert, stack[0]) for stack in saved.stacks(layer).values() for expert in stack
    )
