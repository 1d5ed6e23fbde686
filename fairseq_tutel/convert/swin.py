"""Converts released checkpoints of microsoft/Swin-Transformer: Swin V2, and SwinV2-MoE with its experts.

The sizes of the model are those of the tensors. The image size follows from the windows of the last stage.
Second biases may be absent (MLP_FC2_BIAS: False).
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert import swin_experts
from fairseq_tutel.convert.configs import SWIN, Tensors, with_experts
from fairseq_tutel.files.small import content_of
from fairseq_tutel.options.option import options_in
from fairseq_tutel.vision.attention import SPAN
from fairseq_tutel.vision.options import SwinConfig
from fairseq_tutel.vision.swin_v2 import SwinV2

TASK = "image_classification"
# Buffers that the released code computes from the sizes.
COMPUTED = re.compile(r".*(relative_coords_table|relative_position_index|attn_mask)")
BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.(?:mlp\.)?(.+)")


def read(files: list[list[Path]], classes: int | None = None, class_map: Path | None = None) -> SavedModel:
    """Return a checkpoint with the weights of a released model.

    Args:
        files: from `swin_experts.files_of`.
        classes: size of a new head of zeros, to fine-tune; None to keep the head.
        class_map: file with the classes of the head to keep; None to keep all.

    Raises:
        ValueError: the weights are not those of a Swin V2 or SwinV2-MoE, or no options here fit them.
    """
    ranks, saved_options = swin_experts.open_ranks(files)
    theirs = swin_experts.joined(ranks)
    config, image_size = _sizes_of(theirs)
    weights = _renamed(theirs)
    if classes is not None:
        weights["head.weight"] = torch.zeros(classes, *weights["norm.weight"].shape)
        weights["head.bias"] = torch.zeros(classes)
    _check(weights, config)
    if class_map is not None:
        kept = _class_map(class_map, len(weights["head.weight"]))
        weights |= {name: weights[name][kept].clone() for name in ("head.weight", "head.bias")}
    expert_options = list(swin_experts.command_line(weights, config, saved_options))
    return _checkpoint(weights, config, image_size, expert_options)


def _class_map(path: Path, classes: int) -> list[int]:
    """Return the classes of the head that a file keeps."""
    try:
        numbers = [int(line) for line in content_of(path).decode("ascii").split()]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--class-map is {path}, which has no class number on each line ({error})."
        ) from error
    if not numbers or not all(0 <= number < classes for number in numbers):
        raise ValueError(
            f"--class-map is {path}, whose numbers are not all from 0 to {classes - 1}, those of the head; "
            "give the map of this model."
        )
    return numbers


def _sizes_of(theirs: Mapping[str, Tensor]) -> tuple[SwinConfig, int]:
    """Return the configuration of a released model, from its tensors, and its image size."""
    numbers = [(int(match[1]), int(match[2])) for match in map(BLOCK.fullmatch, theirs) if match]
    stages = range(1 + max((stage for stage, _ in numbers), default=-1))
    depths = [1 + max((j for i, j in numbers if i == stage), default=-1) for stage in stages]
    if not depths or 0 in depths:
        raise ValueError("--input has a stage without blocks; give a whole checkpoint of Swin.")

    def first(stage: int, name: str) -> Tensor:
        key = f"layers.{stage}.blocks.0.{name}"
        if key not in theirs:
            raise ValueError(
                f"--input lacks {key}, which Swin V2 and SwinV2-MoE have; give a checkpoint of one of "
                "these."
            )
        return theirs[key]

    heads = [len(first(i, "attn.cpb_mlp.2.weight")) for i in stages]
    windows = [math.isqrt(len(first(i, "attn.relative_position_index"))) for i in stages]
    patch = theirs["patch_embed.proj.weight"]
    # The first block may have experts, [E, hidden dimension, model dimension].
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
    """Return the window of the position offsets; 0 if it equals `window`."""
    table = theirs.get(f"layers.{stage}.blocks.0.attn.relative_coords_table")
    if table is None or window == 1:
        return 0
    farthest = 2 ** (math.log2(SPAN) * table.max().item()) - 1
    trained = round((window - 1) * SPAN / farthest) + 1
    return 0 if trained == window else trained


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers if any(numbers) else [0]))


def _renamed(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by our names."""
    model = {}
    for name, tensor in theirs.items():
        if COMPUTED.fullmatch(name):
            continue
        if match := BLOCK.fullmatch(name):
            name = f"stages.{match[1]}.blocks.{match[2]}.{match[3]}"
        model[re.sub(r"^layers\.", "stages.", name)] = tensor
    if not any(name.endswith("fc2.bias") for name in model):  # trained without: zeros do the same
        for name in [name for name in model if name.endswith("fc2.weight")]:
            model[name.replace(".weight", ".bias")] = model[name].new_zeros(len(model[name]))
    return model


def _check(model: Mapping[str, Tensor], config: SwinConfig) -> None:
    """Compare names and shapes of the weights with those of the model."""
    head, patch = model.get("head.weight"), model["patch_embed.proj.weight"]
    with torch.device("meta"):
        swin = SwinV2(config, patch.shape[1], 1 if head is None else len(head))
        swin_experts.install(swin, model)
    made = swin.state_dict()
    for name in sorted(made.keys() ^ model.keys()):
        what = "lacks" if name in made else "has"
        raise ValueError(
            f"--input {what} {name} (its name here), unlike Swin V2 and SwinV2-MoE; give a "
            "checkpoint of one of these."
        )
    for name, tensor in made.items():
        if model[name].shape != tensor.shape:
            raise ValueError(
                f"--input has a {name} (its name here) of shape {tuple(model[name].shape)}, but the other "
                f"weights need {tuple(tensor.shape)}; give a whole checkpoint."
            )


def _checkpoint(
    weights: Tensors, config: SwinConfig, image_size: int, expert_options: list[str]
) -> SavedModel:
    """Return a checkpoint of fairseq with these weights, and options as parsed from a command line."""
    plugin.register()
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    task, arch = (with_experts(TASK), with_experts(SWIN)) if expert_options else (TASK, SWIN)
    words = ["", "--task", task, "--arch", arch, "--image-size", str(image_size), *expert_options]
    words += ["--criterion", task] if expert_options else []  # it adds the balance loss
    for option in options_in(SwinConfig):
        value = getattr(config, option.name)
        words += [] if isinstance(value, bool) else [option.flag, str(value)]
    arguments = options.parse_args_and_arch(options.get_training_parser(), words)
    channels, classes = weights["patch_embed.proj.weight"].shape[1], len(weights["head.weight"])
    images = {"classes": [*map(str, range(classes))], "shape": [channels, image_size, image_size]}
    cfg = OmegaConf.to_container(convert_namespace_to_omegaconf(arguments))
    saved = SavedModel({"cfg": cfg, "args": None, "task_state": {"images": images}})
    saved.restart(weights)
    return saved
