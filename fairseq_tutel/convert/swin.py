"""Converts the checkpoints of Swin V2 and SwinV2-MoE that microsoft/Swin-Transformer releases.

- The files X.pth.rank0, X.pth.rank1, ... have the experts of each rank.
- The file X.pth.master has all other weights. Without this file, each rank's file has these weights, too.
- The file X.pth.global is a complete model.

The converter infers the model's dimensions from the shapes of the tensors. The image size is inferred from
the windows of the last stage. Absent biases of fc2 (MLP_FC2_BIAS: False) become zeros.
"""

import argparse
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.checkpoint.files import read_file
from fairseq_tutel.checkpoint.saved import Layer, SavedModel, layers_of
from fairseq_tutel.convert.configs import ROWS, SWIN, Tensors, counts_text, new_checkpoint, with_experts
from fairseq_tutel.convert.tutel_layer import COUNT, our_gates, our_layer
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.option import options_in
from fairseq_tutel.plugin.install import chosen_layers
from fairseq_tutel.vision.attention import SPAN
from fairseq_tutel.vision.options import SwinConfig, numbers
from fairseq_tutel.vision.swin_v2 import SwinV2

TASK = "image_classification"
# Names of buffers that Swin-Transformer's code computes from the model's dimensions.
COMPUTED = re.compile(r".*(relative_coords_table|relative_position_index|attn_mask)")
BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.(?:mlp\.)?(.+)")
PART = re.compile(r"(.+)\.(?:master|rank\d+)")
MOE = re.compile(r"(layers\.\d+\.blocks\.\d+\.mlp\.)_moe_layer\.(.+)")
# For each key of MODEL.SWIN_MOE in a saved configuration, the option of fairseq_tutel.
SAVED = {
    "TOP_VALUE": "--moe-top-k",
    "CAPACITY_FACTOR": "--moe-capacity-factor",
    "GATE_NOISE": "--moe-gate-noise",
    "MOE_DROP": "--swin-expert-dropout",
}
# If a switch of MODEL.SWIN_MOE has the first value, fairseq_tutel's option gets the last value.
SWITCHES = {
    "USE_BPR": (False, "--moe-drop-policy", "position"),
    "IS_GSHARD_LOSS": (True, "--moe-balance-loss", "gshard:1"),
    "NORMALIZE_GATE": (False, "--moe-normalize-gate", "none"),
}


def run(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Run `convert swin`."""
    if arguments.classes is not None and arguments.classes < 1:
        raise ValueError(f"--classes is {arguments.classes}; give a number of at least 1.")
    saved = read(files_of(Path(arguments.input)), arguments.classes)
    saved.write(output)
    options, images = saved.options, saved.state["task_state"]["images"]
    channels, size, _ = images["shape"]
    text = (
        f": {saved.name('model')}, form {options['swin_form']}, "
        f"{sum(t.numel() for t in saved.weights.values()):,} parameters, {len(images['classes'])} classes, "
        f"images of {channels} x {size} x {size}"
    )
    if labels := [layer.label for layer in saved.layers if layer.has_experts]:
        text += (
            f"\n{options['moe_expert_count']} experts, top-{options['moe_top_k']}, "
            f"{options['moe_gate_type']} gate, in {', '.join(labels)}"
        )
    return text


def inputs_of(arguments: argparse.Namespace) -> list[Path]:
    """Return the paths of all files of a released Swin checkpoint."""
    return [*chain(*files_of(Path(arguments.input)))]


def files_of(path: Path) -> list[list[Path]]:
    """Return one list of files per rank. `path` is one of these files, or their common name X.pth."""
    match = PART.fullmatch(path.name)
    base = path if match is None else path.with_name(match[1])
    whole = [p for p in (path, path.with_name(f"{path.name}.global")) if p.is_file()]
    if match is None and whole:
        return [whole[:1]]
    pattern = re.compile(re.escape(base.name) + r"\.rank(\d+)")
    found = [pattern.fullmatch(beside.name) for beside in base.parent.glob("*")]
    ranks = 1 + max((int(match[1]) for match in found if match), default=-1)
    master = base.with_name(f"{base.name}.master")
    shared = [master] if master.is_file() else []
    if not ranks:
        return [shared or [path]]
    return [[base.with_name(f"{base.name}.rank{rank}"), *shared] for rank in range(ranks)]


def read(files: list[list[Path]], classes: int | None = None) -> SavedModel:
    """Load a released Swin model as a fairseq checkpoint.

    Args:
        files: one list of files per rank, from `files_of`.
        classes: for fine-tuning, a zero head for this many classes replaces the head; None keeps it.

    Raises:
        ValueError: the model is not a Swin V2 or SwinV2-MoE, or fairseq_tutel's options cannot express it.
    """
    ranks, saved_options = _open_ranks(files)
    theirs = _joined(ranks)
    config, image_size = _sizes_of(theirs)
    weights = _renamed(theirs)
    if classes is not None:
        weights["head.weight"] = torch.zeros(classes, *weights["norm.weight"].shape)
        weights["head.bias"] = torch.zeros(classes)
    _check(weights, config)
    expert_options = list(_command_line(weights, config, saved_options))
    return _checkpoint(weights, config, image_size, expert_options)


def _open_ranks(files: list[list[Path]]) -> tuple[list[Tensors], Mapping[str, Any]]:
    """Load the weights of each rank's files, and the saved MoE options, which are {} for a dense model."""
    contents: dict[Path, Any] = {}
    ranks: list[Tensors] = []
    # The saved configuration has a class of the library yacs, and is read as a plain dictionary.
    with torch.serialization.safe_globals([(OrderedDict, "yacs.config.CfgNode")]):
        for path in dict.fromkeys(path for own in files for path in own):
            contents[path] = read_file(path, "INPUT")
    for own in files:
        weights: Tensors = {}
        for path in own:
            found = contents[path].get("model") if isinstance(contents[path], dict) else None
            weights |= found if isinstance(found, dict) else {}
        if "patch_embed.proj.weight" not in weights:
            raise ValueError(
                f"INPUT names {own[0]}, which is not a Swin model (no patch_embed.proj.weight); give a "
                "released .pth file, and keep the .master file in the same folder as the .rank files."
            )
        ranks.append(weights)
    saved: Any = contents[files[0][0]].get("config")
    for key in ("MODEL", "SWIN_MOE"):
        saved = saved.get(key) if isinstance(saved, dict) else None
    return ranks, saved if isinstance(saved, dict) else {}


def _joined(ranks: list[Tensors]) -> Tensors:
    """Join the weights of all ranks, and rename weights of MoE layers to fairseq_tutel's names."""
    weights: Tensors = {}
    for name, tensor in ranks[0].items():
        match = MOE.fullmatch(name)
        if match is None:
            weights[name] = tensor
            continue
        ours, prefix = f"{match[1]}fc1.", name.removesuffix(match[2])
        if not any(key.startswith(ours) for key in weights):
            weights |= {ours + key: own for key, own in _layer(ranks, prefix).items()}
        if match[2] != COUNT and not match[2].startswith(("experts.", "gate")):
            weights[ours + match[2]] = tensor
    return weights


def _layer(ranks: list[Tensors], prefix: str) -> Tensors:
    """Join a MoE layer's weights from all ranks, under fairseq_tutel's names."""
    label = prefix.rstrip(".")
    own = {n.removeprefix(prefix): t for n, t in ranks[0].items() if n.startswith(prefix)}
    experts = len(_gate(our_gates(own), "", label)[1])
    try:
        return our_layer(ranks, prefix, experts)
    except (KeyError, ValueError) as error:
        raise ValueError(f"INPUT has the MoE layer {label}, which {error}; give all files.") from error


def _moe_layers(weights: Mapping[str, Tensor]) -> list[Layer]:
    """Return the layers of a model that have experts, in the order of the model's layers."""
    return [layer for layer in layers_of(weights) if layer.has_experts]


def _install(made: nn.Module, model: Mapping[str, Tensor]) -> None:
    """Replace a dense Swin model's FFNs by experts, in place, in each layer that has experts in `model`."""
    for layer in _moe_layers(model):
        block: Any = made.get_submodule(layer.name)
        kind, rows = _gate(model, f"{layer.moe}.", layer.label)
        config = MoEConfig(
            model_dim=block.fc1.in_features,
            hidden_dim=block.fc1.out_features,
            num_experts=len(rows),
            top_k=1,
            gate_type=kind,
            gate_projection_dim=rows.shape[1],
        )
        block.fc1, block.fc2 = MoELayer(config, seed=0), nn.Identity()


def _gate(weights: Mapping[str, Tensor], prefix: str, label: str) -> tuple[str, Tensor]:
    """Return a gate's type (linear or cosine), and the gate's tensor that has one row per expert."""
    for kind, keys in ROWS.items():
        rows = weights.get(f"{prefix}gate.{keys[0]}")
        if rows is not None and rows.dim() == 2:
            return kind, rows
    raise ValueError(
        f"INPUT has the MoE layer {label} without a linear or cosine gate; give a SwinV2-MoE checkpoint."
    )


def _command_line(
    model: Mapping[str, Tensor], config: SwinConfig, saved: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the command-line arguments that describe a Swin model's experts, if the model has experts.

    Options that are not in `saved` keep the defaults of the architecture.
    """
    layers = _moe_layers(model)
    if not layers:
        return
    gates = [_gate(model, f"{layer.moe}.", layer.label) for layer in layers]
    kind, first = gates[0]  # A model with gates of several types cannot be loaded.
    counts = counts_text([len(rows) for _, rows in gates])
    yield from ("--moe-expert-count", counts, "--moe-gate-type", kind)
    if kind == "cosine":
        yield from ("--moe-gate-projection-dim", str(first.shape[1]))
    depths, blocks = numbers(config.depths), {(layer.stack, layer.index) for layer in layers}
    yield from _blocks(depths, blocks)
    for key, flag in SAVED.items():
        if isinstance(saved.get(key), int | float):
            yield from (flag, str(saved[key]))
    for key, (value, flag, text) in SWITCHES.items():
        # With top-1, --moe-normalize-gate is left out because it has no effect.
        if saved.get(key) is value and (key != "NORMALIZE_GATE" or saved.get("TOP_VALUE") != 1):
            yield from (flag, text)


def _blocks(depths: list[int], blocks: set[tuple[int, int]]) -> tuple[str, ...]:
    """Return the command-line arguments that select the given blocks of a Swin model for experts."""
    first = min(stage for stage, _ in blocks)
    for freq in range(1, max(depths) + 1):
        stages = range(first, len(depths))
        if blocks == {(i, j) for i in stages for j in chosen_layers(range(depths[i]), freq)}:
            return ("--moe-freq", str(freq), "--swin-expert-stages", str(len(stages)))
    raise ValueError(
        f"INPUT has experts in the blocks (stage, index) {sorted(blocks)}, which no values of "
        "--moe-freq and --swin-expert-stages select; give another checkpoint."
    )


def _sizes_of(theirs: Mapping[str, Tensor]) -> tuple[SwinConfig, int]:
    """Infer a Swin model's configuration and image size from its tensor shapes."""
    blocks = [(int(match[1]), int(match[2])) for match in map(BLOCK.fullmatch, theirs) if match]
    stages = range(1 + max((stage for stage, _ in blocks), default=-1))
    depths = [1 + max((j for i, j in blocks if i == stage), default=-1) for stage in stages]
    if not depths or 0 in depths:
        raise ValueError("INPUT has a stage without blocks; give a complete Swin checkpoint.")

    def first(stage: int, name: str) -> Tensor:
        key = f"layers.{stage}.blocks.0.{name}"
        if key not in theirs:
            raise ValueError(
                f"INPUT lacks the weight {key}; give a complete checkpoint of Swin V2 or SwinV2-MoE."
            )
        return theirs[key]

    heads = [len(first(i, "attn.cpb_mlp.2.weight")) for i in stages]
    windows = [math.isqrt(len(first(i, "attn.relative_position_index"))) for i in stages]
    patch = theirs["patch_embed.proj.weight"]
    # The first block's fc1 may have experts, with the shape [E, hidden dimension, model dimension].
    experts = theirs.get("layers.0.blocks.0.mlp.fc1.experts.fc1_weight")
    hidden_dim = len(first(0, "mlp.fc1.weight")) if experts is None else experts.shape[1]
    scales_heads = "layers.0.blocks.0.attn.logit_scale" in theirs
    config = SwinConfig(
        form="v2" if scales_heads else "moe",
        patch_size=patch.shape[2],
        embed_dim=patch.shape[0],
        depths=_list(depths),
        heads=_list(heads),
        window=max(windows),
        position_windows=_list([_trained_window(theirs, i, window) for i, window in enumerate(windows)]),
        mlp_ratio=hidden_dim / patch.shape[0],
    )
    return config, patch.shape[2] * 2 ** (len(depths) - 1) * windows[-1]


def _trained_window(theirs: Mapping[str, Tensor], stage: int, window: int) -> int:
    """Return the window size with which a stage's position table was trained, or 0 if it is `window`."""
    table = theirs.get(f"layers.{stage}.blocks.0.attn.relative_coords_table")
    if table is None or window == 1:
        return 0
    farthest = 2 ** (math.log2(SPAN) * table.max().item()) - 1
    trained = round((window - 1) * SPAN / farthest) + 1
    return 0 if trained == window else trained


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers if any(numbers) else [0]))


def _renamed(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of a released Swin model to fairseq_tutel's names, without computed buffers."""
    model = {}
    for name, tensor in theirs.items():
        if COMPUTED.fullmatch(name):
            continue
        if match := BLOCK.fullmatch(name):
            name = f"stages.{match[1]}.blocks.{match[2]}.{match[3]}"
        model[re.sub(r"^layers\.", "stages.", name)] = tensor
    if not any(name.endswith("fc2.bias") for name in model):  # Absent biases equal zeros.
        for name in [name for name in model if name.endswith("fc2.weight")]:
            model[name.replace(".weight", ".bias")] = model[name].new_zeros(len(model[name]))
    return model


def _check(model: Mapping[str, Tensor], config: SwinConfig) -> None:
    """Raise ValueError if names or shapes of weights do not fit a model with the inferred configuration."""
    head, patch = model.get("head.weight"), model["patch_embed.proj.weight"]
    with torch.device("meta"):
        swin = SwinV2(config, patch.shape[1], 1 if head is None else len(head))
        _install(swin, model)
    found, needed = ({n: tuple(t.shape) for n, t in m.items()} for m in (model, swin.state_dict()))
    for name in sorted(found.keys() | needed.keys()):
        if found.get(name) != needed.get(name):
            raise ValueError(
                f"INPUT has the shape {found.get(name)} instead of {needed.get(name)} for {name} (in "
                "fairseq_tutel's naming); give a complete checkpoint of Swin V2 or SwinV2-MoE."
            )


def _checkpoint(
    weights: Tensors, config: SwinConfig, image_size: int, expert_options: list[str]
) -> SavedModel:
    """Return a fairseq checkpoint with the given weights, and with options parsed from a command line."""
    task, arch = (with_experts(TASK), with_experts(SWIN)) if expert_options else (TASK, SWIN)
    words = ["--task", task, "--arch", arch, "--image-size", str(image_size), *expert_options]
    words += ["--criterion", task] if expert_options else []  # The MoE criterion adds the balance loss.
    for option in options_in(SwinConfig):
        value = getattr(config, option.name)
        words += [] if isinstance(value, bool) else [option.flag, str(value)]
    channels, classes = weights["patch_embed.proj.weight"].shape[1], len(weights["head.weight"])
    images = {"classes": [*map(str, range(classes))], "shape": [channels, image_size, image_size]}
    return new_checkpoint(words, {}, weights, {"images": images})
