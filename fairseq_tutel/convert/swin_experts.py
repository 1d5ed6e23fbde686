"""Reads the files, MoE layers and options of released SwinV2-MoE models.

Microsoft's training saves X.pth.rank0, X.pth.rank1, ... with the experts of each rank. X.pth.master holds
all other weights; without it each rank's file holds them too. X.pth.global is a whole model in one file.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.checkpoint.reading import read_file
from fairseq_tutel.checkpoint.saved import Layer, layers_of
from fairseq_tutel.convert.configs import ROWS, Tensors, counts_text
from fairseq_tutel.convert.tutel_layer import COUNT, our_gates, our_layer
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.plugin.feed_forward import chosen_layers
from fairseq_tutel.vision.options import SwinConfig, numbers

PART = re.compile(r"(.+)\.(?:master|rank\d+)")
MOE = re.compile(r"(layers\.\d+\.blocks\.\d+\.mlp\.)_moe_layer\.(.+)")
# Keys of MODEL.SWIN_MOE in a saved configuration, and their options here.
SAVED = {
    "TOP_VALUE": "--moe-top-k",
    "CAPACITY_FACTOR": "--moe-capacity-factor",
    "GATE_NOISE": "--moe-gate-noise",
    "MOE_DROP": "--swin-expert-dropout",
}
# Its switches: (value, option here, value here).
SWITCHES = {
    "USE_BPR": (False, "--moe-drop-policy", "position"),
    "IS_GSHARD_LOSS": (True, "--moe-balance-loss", "gshard:1"),
    "NORMALIZE_GATE": (False, "--moe-normalize-gate", "none"),
}


def files_of(path: Path) -> list[list[Path]]:
    """Return the files with the weights of each rank, for one of the files or their common name X.pth."""
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


def open_ranks(files: list[list[Path]]) -> tuple[list[Tensors], Mapping[str, Any]]:
    """Return the weights of each rank, and the saved options of its experts, empty without any.

    Raises:
        ValueError: a file is damaged, holds no model, or is of another model.
    """
    contents: dict[Path, Any] = {}
    ranks: list[Tensors] = []
    # The configuration is read as a plain dictionary.
    with torch.serialization.safe_globals([(OrderedDict, "yacs.config.CfgNode")]):
        for path in dict.fromkeys(path for own in files for path in own):
            contents[path] = read_file(path, "--input")
    for own in files:
        weights: Tensors = {}
        for path in own:
            found = contents[path].get("model") if isinstance(contents[path], dict) else None
            weights |= found if isinstance(found, dict) else {}
        if "patch_embed.proj.weight" not in weights:
            raise ValueError(
                f"--input names {own[0]}, which holds no Swin (no patch_embed.proj.weight in its model); "
                "give a released .pth file, and keep .master next to the files of ranks."
            )
        ranks.append(weights)
        for name in sorted(ranks[0].keys() ^ weights.keys()):
            raise ValueError(
                f"--input names {files[0][0]} and {own[0]}, only one of which has {name}; give the files "
                "of one model."
            )
    saved: Any = contents[files[0][0]].get("config")
    for key in ("MODEL", "SWIN_MOE"):
        saved = saved.get(key) if isinstance(saved, dict) else None
    return ranks, saved if isinstance(saved, dict) else {}


def joined(ranks: list[Tensors]) -> Tensors:
    """Return the weights of the whole model; MoE layers have our names, in `mlp.fc1`.

    Raises:
        ValueError: the ranks do not hold all experts, or a layer is of another kind.
    """
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
    """Return a MoE layer's weights by our names; the number of experts is the gate's."""
    label = prefix.rstrip(".")
    own = {n.removeprefix(prefix): t for n, t in ranks[0].items() if n.startswith(prefix)}
    experts = len(_gate(our_gates(own), "", label)[1])
    try:
        return our_layer(ranks, prefix, experts)
    except ValueError as error:
        raise ValueError(
            f"--input has the MoE layer {label} that {error}; give the files of all ranks of a SwinV2-MoE."
        ) from error


def moe_layers(weights: Mapping[str, Tensor]) -> list[Layer]:
    """Return the layers with experts, in order."""
    return [layer for layer in layers_of(weights) if layer.has_experts]


def install(made: nn.Module, model: Mapping[str, Tensor]) -> None:
    """Add the MoE layers of a model's weights to a dense Swin, in place."""
    for layer in moe_layers(model):
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
    """Return the type of a layer's gate, linear or cosine, and its tensor with a row per expert."""
    for kind, key in ROWS.items():
        rows = weights.get(f"{prefix}gate.{key}")
        if rows is not None and rows.dim() == 2:
            return kind, rows
    raise ValueError(
        f"--input has the MoE layer {label} without a linear or cosine gate; give a checkpoint of "
        "SwinV2-MoE."
    )


def command_line(
    model: Mapping[str, Tensor], config: SwinConfig, saved: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the options of experts as words of a command line; none for a dense model.

    Args:
        model: the weights by our names.
        config: the sizes of the model.
        saved: the options from `open_ranks`; missing ones have the architecture's defaults.

    Raises:
        ValueError: no options here give this model.
    """
    layers = moe_layers(model)
    if not layers:
        return
    gates = [_gate(model, f"{layer.moe}.", layer.label) for layer in layers]
    kinds = {(kind, rows.shape[1] if kind == "cosine" else 0) for kind, rows in gates}
    if len(kinds) > 1:
        raise ValueError(
            f"--input has gates of several types or projections ({sorted(kinds)}), and a model here has "
            "one; give another checkpoint."
        )
    kind, projection_dim = kinds.pop()
    counts = counts_text([len(rows) for _, rows in gates])
    yield from ("--moe-expert-count", counts, "--moe-gate-type", kind)
    if projection_dim:
        yield from ("--moe-gate-projection-dim", str(projection_dim))
    depths, blocks = numbers(config.depths), {(layer.stack, layer.index) for layer in layers}
    yield from _blocks(depths, blocks)
    for key, flag in SAVED.items():
        if isinstance(saved.get(key), int | float):
            yield from (flag, str(saved[key]))
    for key, (value, flag, text) in SWITCHES.items():
        # Normalization has no effect on a single expert.
        if saved.get(key) is value and (key != "NORMALIZE_GATE" or saved.get("TOP_VALUE") != 1):
            yield from (flag, text)


def _blocks(depths: list[int], blocks: set[tuple[int, int]]) -> tuple[str, ...]:
    """Return the options that select these blocks (stage, index) for experts."""
    first = min(stage for stage, _ in blocks)
    for freq in range(1, max(depths) + 1):
        stages = range(first, len(depths))
        if blocks == {(i, j) for i in stages for j in chosen_layers(range(depths[i]), freq)}:
            return ("--moe-freq", str(freq), "--swin-expert-stages", str(len(stages)))
    raise ValueError(
        f"--input has experts in the blocks (stage, index) {sorted(blocks)}, which no --moe-freq and "
        "--swin-expert-stages give; give another checkpoint."
    )
