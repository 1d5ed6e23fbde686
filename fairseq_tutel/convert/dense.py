"""convert dense: make a dense checkpoint of one with experts, which stock fairseq opens.

Of every MoE layer one expert becomes the feed-forward network, or several become one network as wide as
they are together, each with an even share of the weight. The gate is gone: the outputs are the same only
where it made no difference, and the tool says whether it did. Shared experts become part of the network.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_tutel.moe.config import BY_OWNER, MoEConfig, label_of, options_of
from fairseq_tutel.moe.options import options_in
from fairseq_tutel.moe.slots import capacity_of
from fairseq_tutel.plugin.feed_forward import SIDES
from fairseq_tutel.tools.arguments import add_conversion
from fairseq_tutel.checkpoint.saved import (
    DENSE,
    ROWS,
    Layer,
    MoEFile,
    dense_step,
    experts_of,
    layers_of,
    open_moe,
)
from fairseq_tutel.convert.names import (
    PARTS,
    drop,
    model_options,
    name_of,
    rename,
    without_experts,
)
from fairseq_tutel.tools.convert.selection import by_layer, ids, refuse_unknown
from fairseq_tutel.convert.upcycle_layer import sums_to_1
from fairseq_tutel.vision.options import SwinExpertsConfig


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    text = "make a dense checkpoint of chosen experts"
    parser = add_conversion(kinds, "dense", convert, text, __doc__, "a checkpoint with experts")
    parser.add_argument(
        "--experts",
        nargs="+",
        required=True,
        metavar="IDS",
        help="by id: one, or several to be one wide network, or all; for all layers, as 0 or 0,1, or as "
        "decoder_1=3 decoder_3=0",
    )
    parser.add_argument(
        "--weight",
        type=float,
        metavar="W",
        help="what the chosen experts weigh together: by default what a token's experts do where their "
        "weights sum up to one number, else 1, for which a log's mean expert1_weight may be better",
    )


def convert(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    """Convert as the command line says, and say what the result computes."""
    if arguments.weight is not None and not 0 < arguments.weight < 1e6:
        raise ValueError(f"--weight is {arguments.weight:g}; give a number above 0.")
    file = open_moe(path)
    chosen = _chosen(arguments.experts, file)
    steps, differ = {}, []
    for layer, config in file.layers.items():
        # What a token's experts weigh together; 1 where that is a matter of probabilities.
        usual = config.routed_scaling_factor if sums_to_1(config) else 1.0
        weight = usual if arguments.weight is None else arguments.weight
        steps[layer] = _dense_tensors(file.model, layer, config, chosen[layer], weight)
        if weight != usual or not _is_exact(file.model, layer, config, chosen[layer]):
            differ.append(layer.label)
    widths = _widen(file, steps)
    _make_dense(file.state, widths)
    file.write(_weights(file, steps), output)
    print(f"wrote {output}: {name_of(file.state, 'model')}, a training begins anew with it")
    if differ:
        print(
            f"its outputs are not the MoE model's: the gate makes a difference in {', '.join(differ)}"
        )
    else:
        print("its outputs are the MoE model's, to rounding")


def _chosen(words: list[str], file: MoEFile) -> dict[Layer, list[int]]:
    """Return the experts that become the network of every layer."""
    all_of = {layer: list(range(config.num_experts)) for layer, config in file.layers.items()}
    read = by_layer("--experts", words, list(file.layers), _ids_or_all)
    for layer, found in read.items():
        refuse_unknown("--experts", layer, found or [], len(all_of[layer]))
    for layer in all_of:
        if layer not in read:
            raise ValueError(
                f"--experts names none for {layer.label}; add {layer.label}=0, or the like."
            )
    return {layer: read[layer] or all_of[layer] for layer in all_of}


def _ids_or_all(text: str) -> list[int]:
    """Read ids; no ids stand for all."""
    try:
        return [] if text == "all" else ids(text)
    except ValueError as error:
        raise ValueError(f"{error}, or all") from None


def _widen(file: MoEFile, steps: dict[Layer, dict[str, Tensor]]) -> dict[str, int]:
    """Add the dense layers' steps, make all of a side equally wide, and return the sides' widths."""
    for layer in layers_of(file.model):
        if not layer.has_experts:
            steps[layer] = dense_step(file.model, layer)
    widths: dict[str, int] = {}
    for layer, step in steps.items():
        widths[layer.side] = max(widths.get(layer.side, 0), len(step["fc1.bias"]))
    for layer, step in steps.items():
        if len(step["fc1.bias"]) < widths[layer.side]:
            steps[layer] = _widened(step, widths[layer.side])
            print(f"{layer.label}: hidden units of 0 are added, {widths[layer.side]} in all")
    return widths


def _make_dense(state: dict[str, Any], widths: dict[str, int]) -> None:
    """Let the options be those of a dense model, by the names that stock fairseq knows."""
    for part in PARTS:
        rename(state, part, without_experts(name_of(state, part)))
    for owner in BY_OWNER:
        drop(state, [option.key for option in options_of(owner)])
    drop(state, [option.key for option in options_in(SwinExpertsConfig)])
    options = model_options(state)
    for side, width in widths.items():
        if side in SIDES:
            options[f"{side}_ffn_embed_dim"] = width
            continue
        dim, ratio = options["swin_embed_dim"], options["swin_mlp_ratio"]
        if width != int(dim * 2 ** int(side.partition(".")[2]) * ratio):
            raise ValueError(
                f"--experts makes the steps of {side} {width} wide, where all of a Swin's are {ratio:g} "
                "times as wide as its tokens (--swin-mlp-ratio); choose one expert of that width."
            )


def _weights(file: MoEFile, steps: dict[Layer, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the dense model's state dict, in its order."""
    made: dict[str, Tensor] = {}
    begun: set[Layer] = set()
    of_name = {f"{layer.name}.": layer for layer in steps}
    for key, tensor in file.model.items():
        prefix = next((name for name in of_name if key.startswith(name)), "")
        map_name = key.removeprefix(prefix).partition(".")[0]
        if not prefix or map_name not in ("fc1", "fc2", "ffn_layernorm"):
            made[key] = tensor
        elif of_name[prefix] not in begun:
            layer = of_name[prefix]
            begun.add(layer)
            made |= {f"{layer.name}.{name}": value for name, value in steps[layer].items()}
    return made


def _dense_tensors(
    model: Mapping[str, Tensor],
    layer: Layer,
    config: MoEConfig,
    chosen: Sequence[int],
    weight: float,
) -> dict[str, Tensor]:
    """Return a dense step's tensors by their names within the layer.

    The weight is that of all chosen experts together: each one's share of it goes into its second map.
    """
    _refuse(config, layer, len(chosen))
    scale = weight / len(chosen)
    made = {}
    for name in DENSE:
        stack = model[f"{layer.step}.experts.{name.replace('.', '_')}"]
        scales = name.startswith("fc2") and scale != 1
        side_by_side = [stack[i] * scale if scales else stack[i] for i in chosen]
        if config.shared_experts:
            side_by_side.append(model[f"{layer.step}.beside.shared.{name}"])
        if name == "fc2.bias":
            made[name] = torch.stack(side_by_side).sum(dim=0)
        else:
            made[name] = torch.cat(side_by_side, dim=1 if name == "fc2.weight" else 0)
    for kind in ("weight", "bias") if config.hidden_layer_norm else ():
        made[f"ffn_layernorm.{kind}"] = model[f"{layer.step}.experts.hidden_layer_norm.{kind}"]
    return made


def _refuse(config: MoEConfig, layer: Layer, number: int) -> None:
    if config.expert_type != "ffn":
        raise ValueError(
            f"{layer.label} has experts of the type {config.expert_type} ({label_of('expert_type')}), for "
            "which fairseq has no dense layer; convert dense takes ffn."
        )
    if config.residual:
        raise ValueError(
            f"{layer.label} mixes experts and a dense network token by token ({label_of('residual')}), "
            "which no dense layer can; convert dense takes models without it."
        )
    if config.hidden_layer_norm and (number > 1 or config.shared_experts):
        raise ValueError(
            f"{layer.label} normalises each expert's hidden layer by itself (--scale-fc), which one of "
            "several side by side cannot; choose one in --experts, of a model without shared ones."
        )


def _is_exact(
    model: Mapping[str, Tensor], layer: Layer, config: MoEConfig, chosen: Sequence[int]
) -> bool:
    """Whether a dense step of the usual weight computes what the layer does, in evaluation.

    It does where the weights of a token's experts sum to 1, and experts repeat every p of them: a token
    gets all p kinds alike, since p is 1 or its gate cannot tell them apart, and so does the dense step.
    """
    drops = capacity_of(config, training=False).is_limited
    if not sums_to_1(config) or config.choice == "experts" or config.prescore or drops:
        return False
    return any(
        _repeats(model, layer, config, p)
        for p in range(1, len(chosen) + 1)
        if len(counts := Counter(i % p for i in chosen)) == p and len(set(counts.values())) == 1
    )


def _repeats(model: Mapping[str, Tensor], layer: Layer, config: MoEConfig, p: int) -> bool:
    """Whether experts repeat every p, and every token chooses runs of p neighbours, of one weight."""
    num_experts = config.num_experts
    if num_experts % p or config.top_k % p:
        return False
    return (p == 1 or _gate_knows_runs_alone(model, layer, config, p)) and all(
        torch.equal(stack[i], stack[i % p])
        for stack in experts_of(model, layer).values()
        for i in range(p, num_experts)
    )


def _gate_knows_runs_alone(
    model: Mapping[str, Tensor], layer: Layer, config: MoEConfig, p: int
) -> bool:
    """Whether the gate gives the p experts of every run of neighbours the same score."""
    kind = config.gate_types[config.gate_index]
    if kind == "hash":
        return p == config.num_experts
    if kind not in ROWS or config.balance_bias:
        return False
    gate = "gate" if config.gate_index == 0 else f"other_gates.{config.gate_index - 1}"
    rows_ED = model[f"{layer.step}.{gate}.{ROWS[kind]}"]
    return torch.equal(rows_ED, rows_ED[::p].repeat_interleave(p, dim=0))


def _widened(step: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Return a dense step with hidden units that are 0 and stay 0 behind its own, `width` in all."""
    more = width - len(step["fc1.bias"])
    if more and "ffn_layernorm.weight" in step:
        raise ValueError(
            "--input normalises hidden layers (--scale-fc) of several widths, and all of a dense model's "
            "are equally wide; choose --experts that are."
        )
    return {
        **step,
        "fc1.weight": F.pad(step["fc1.weight"], (0, 0, 0, more)),
        "fc1.bias": F.pad(step["fc1.bias"], (0, more)),
        "fc2.weight": F.pad(step["fc2.weight"], (0, more)),
    }
