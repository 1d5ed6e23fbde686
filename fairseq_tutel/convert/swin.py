"""convert swin: write a released checkpoint of Swin V2 as one of fairseq.

It reads what microsoft/Swin-Transformer saves: Swin V2, and SwinV2-MoE, dense and with experts. For
experts name X.pth, and keep X.pth.master and X.pth.rank0, X.pth.rank1, ... together. Second biases may be
absent (MLP_FC2_BIAS: False). The tensors tell the model's sizes. The image size is derived from the windows
of the last stage.
"""

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel import plugin
from fairseq_tutel.files.small import content_of
from fairseq_tutel.moe.options import options_in
from fairseq_tutel.tools.arguments import add_conversion, refuse_output
from fairseq_tutel.convert import swin_experts
from fairseq_tutel.checkpoint.reading import begun_anew, write
from fairseq_tutel.convert.names import SWIN, model_options, name_of, with_experts
from fairseq_tutel.vision.options import SwinConfig
from fairseq_tutel.vision.position_bias import SPAN
from fairseq_tutel.vision.swin_v2 import SwinV2

TASK = "image_classification"
# What the released code computes from sizes and keeps beside the weights.
COMPUTED = re.compile(r".*(relative_coords_table|relative_position_index|attn_mask)")
BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.(?:mlp\.)?(.+)")


def add_to(kinds: Any) -> None:
    """Add the conversion to the command line."""
    text = "from a released Swin V2"
    parser = add_conversion(kinds, "swin", convert, text, __doc__, "the released .pth file")
    parser.add_argument(
        "--classes",
        type=int,
        metavar="N",
        help="begin a new head for N classes, of zeros, in place of the released one, to fine-tune",
    )
    parser.add_argument(
        "--class-map",
        type=Path,
        metavar="FILE",
        help="keep these classes of the head: a released class number per line, as map22kto1k.txt has",
    )


def convert(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    """Convert as the command line says, and say what the model is."""
    if arguments.classes is not None and arguments.classes < 1:
        raise ValueError(f"--classes is {arguments.classes}; give a number of at least 1.")
    if arguments.classes is not None and arguments.class_map is not None:
        raise ValueError("--classes and --class-map are both given; drop one.")
    files = swin_experts.files_of(path)
    refuse_output(output, [file for own in files for file in own], arguments.overwrite)
    ranks, saved = swin_experts.open_ranks(files)
    theirs = swin_experts.joined(ranks)
    config, image_size = config_of(theirs)
    model = _renamed(theirs)
    if arguments.classes is not None:
        width = model["norm.weight"].shape
        model["head.weight"] = torch.zeros(arguments.classes, *width)
        model["head.bias"] = torch.zeros(arguments.classes)
    _check(model, config)
    if arguments.class_map is not None:
        kept = _class_map(arguments.class_map, len(model["head.weight"]))
        model |= {name: model[name][kept].clone() for name in ("head.weight", "head.bias")}
    options = list(swin_experts.words(model, config, saved))
    state = _checkpoint(model, config, image_size, options)
    write(state, output)
    classes, channels = len(model["head.weight"]), model["patch_embed.proj.weight"].shape[1]
    print(
        f"wrote {output}: {name_of(state, 'model')}, form {config.form}, "
        f"{sum(t.numel() for t in model.values()):,} parameters, {classes} classes, images of "
        f"{channels} x {image_size} x {image_size}"
    )
    if options:
        labels = ", ".join(layer.label for layer in swin_experts.moe_steps(model))
        found = model_options(state)
        print(
            f"{found['moe_expert_count']} experts, top-{found['moe_top_k']}, "
            f"{found['moe_gate_type']} gate, in {labels}"
        )


def _class_map(path: Path, classes: int) -> list[int]:
    """Return the classes of the head that a file keeps.

    Raises:
        ValueError: it cannot be read, or has something else than numbers of classes.
    """
    try:
        numbers = [int(line) for line in content_of(path).decode("ascii").split()]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--class-map is {path}, which has no class number on each line ({error})."
        ) from error
    if not numbers or not all(0 <= number < classes for number in numbers):
        raise ValueError(
            f"--class-map is {path}, whose numbers are not all from 0 to {classes - 1}, the head's; "
            "give the map of this model."
        )
    return numbers


def config_of(theirs: Mapping[str, Tensor]) -> tuple[SwinConfig, int]:
    """Return what a released model is, by its tensors, and the side of its images.

    Raises:
        ValueError: it says too little, or is another kind of Swin.
    """
    numbers = [
        (int(match[1]), int(match[2]))
        for match in map(BLOCK.fullmatch, theirs)
        if match is not None
    ]
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
        position_windows=_list(
            [_trained_window(theirs, i, window) for i, window in enumerate(windows)]
        ),
        mlp_ratio=hidden_dim / patch.shape[0],
    )
    return config, patch.shape[2] * 2 ** (len(depths) - 1) * windows[-1]


def _trained_window(theirs: Mapping[str, Tensor], stage: int, window: int) -> int:
    """Return the window that offsets are measured by; 0 where it is the window itself."""
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
    """Refuse weights that are not those of the model which they say they are."""
    head, patch = model.get("head.weight"), model["patch_embed.proj.weight"]
    with torch.device("meta"):
        swin = SwinV2(config, patch.shape[1], 1 if head is None else len(head))
        swin_experts.install(swin, model)
    made = swin.state_dict()
    for name in sorted(made.keys() ^ model.keys()):
        what = "lacks" if name in made else "has"
        raise ValueError(
            f"--input {what} {name} (by the name here), unlike Swin V2 and SwinV2-MoE; give a "
            "checkpoint of one of these."
        )
    for name, tensor in made.items():
        if model[name].shape != tensor.shape:
            raise ValueError(
                f"--input has a {name} (by the name here) of shape {tuple(model[name].shape)}, where the "
                f"others ask for {tuple(tensor.shape)}; give a whole checkpoint."
            )


def _checkpoint(
    model: dict[str, Tensor], config: SwinConfig, image_size: int, of_experts: list[str]
) -> dict[str, Any]:
    """Return a checkpoint of fairseq with these weights, whose options are those of a command line."""
    plugin.register()
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    task, arch = (with_experts(TASK), with_experts(SWIN)) if of_experts else (TASK, SWIN)
    words = ["", "--task", task, "--arch", arch, "--image-size", str(image_size), *of_experts]
    words += ["--criterion", task] if of_experts else []  # it adds the balance loss
    for option in options_in(SwinConfig):
        value = getattr(config, option.name)
        words += [] if isinstance(value, bool) else [option.flag, str(value)]
    arguments = options.parse_args_and_arch(options.get_training_parser(), words)
    channels, classes = model["patch_embed.proj.weight"].shape[1], len(model["head.weight"])
    return begun_anew(
        {
            "cfg": OmegaConf.to_container(convert_namespace_to_omegaconf(arguments)),
            "args": None,
            "model": model,
            "task_state": {
                "images": {
                    "classes": [str(i) for i in range(classes)],
                    "shape": [channels, image_size, image_size],
                }
            },
        }
    )
