"""Defines the subcommands upcycle, student, pregate and members, which make another kind of model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_tutel.convert.commands.conversion import NEW_RUN, Conversion, one_file, option
from fairseq_tutel.convert.options import Variation
from fairseq_tutel.option import flag_of, options_in, read, refuse_bad_values
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.tools.arguments import refuse_output
from fairseq_tutel.vision.options import SwinExpertsConfig

if TYPE_CHECKING:
    from fairseq_tutel.checkpoint.saved import SavedModel

OPTIONS = tuple(
    item for item in (*options_of("model"), *options_in(SwinExpertsConfig)) if item.theme != "Older names"
)


@one_file
def _upcycle(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Make a Mixture-of-Experts checkpoint from a dense checkpoint.

    In every chosen layer, each expert is a copy of the feed-forward network (Komatsuzaki et al. 2022,
    Sparse Upcycling). With a smaller --moe-expert-ffn-dim, each expert is a part of it (He et al. 2024).
    Gates are initialized. The tool prints whether the initial outputs equal the dense model's outputs.
    Start a new training run from the file with --finetune-from-model.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert.configs import counts_text
    from fairseq_tutel.convert.upcycle import differences, upcycle

    how = read(Variation, arguments)
    refuse_bad_values(how)
    # An absent option is None or, for a switch, False. 0 is a value.
    given = {item.key: getattr(arguments, item.key) for item in OPTIONS}
    given = {key: value for key, value in given.items() if value is not None and value is not False}
    saved = SavedModel.open(inputs[0])
    configs = upcycle(saved, given, how)
    counts = counts_text([config.num_experts for config in configs.values()])
    first, labels = next(iter(configs.values())), ", ".join(layer.label for layer in configs)
    reasons = dict.fromkeys(r for config in configs.values() for r in differences(config, how))
    what = (
        f"differ from the dense model's outputs: {'; '.join(reasons)}"
        if reasons
        else "equal the dense model's outputs up to rounding"
    )
    return saved, (
        f": {saved.name('model')}, {counts} experts of {first.hidden_dim}, top-{first.top_k}, in {labels}\n"
        f"its initial outputs {what}"
    )


@one_file
def _student(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Remove layers from a dense or MoE checkpoint.

    Train the new checkpoint with --finetune-from-model and the printed options. --criterion
    moe_distillation trains it to imitate the original model. --moe-freq F selects every F-th layer for
    experts, so the remaining MoE layers must be every F-th layer for some F.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert import models

    saved = SavedModel.open(inputs[0])
    sides = models.sides_of(saved)
    kept = _kept(arguments, {side: len(layers) for side, layers in sides.items()})
    changed = models.keep_layers(saved, kept)
    for side, layers in sides.items():
        numbers = ", ".join(map(str, kept[side]))
        print(f"{side}: {len(kept[side])} of {len(layers)} layers: {numbers}")
    words = " ".join(f"{flag_of(key)} {value}" for key, value in changed.items() if value is not None)
    return saved, f"{NEW_RUN}, with --finetune-from-model and {words}"


def _kept(arguments: argparse.Namespace, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Parse the options that select layers; return the layers to keep in the encoder and the decoder."""
    main = "decoder" if "decoder" in sizes else "encoder"
    kept = {side: list(range(size)) for side, size in sizes.items()}
    for prefix, side in (("", main), ("encoder_", "encoder")):
        for verb in ("drop", "keep"):
            key = f"{prefix}{verb}_layers"
            text = getattr(arguments, key)
            if text is None:
                continue
            if prefix and len(sizes) == 1:
                raise ValueError(
                    f"{flag_of(key)} is {text}, but the model is not an encoder-decoder; give "
                    f"--{verb}-layers."
                )
            named = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
            if not {*named} <= {*range(sizes[side])} or len({*named}) < len(named):
                raise ValueError(
                    f"{flag_of(key)} is {text!r}, but the {side} has the layers 0 to {sizes[side] - 1}; "
                    "give different numbers of these layers, separated by commas, such as 1,3."
                )
            kept[side] = [i for i in range(sizes[side]) if (i in named) == (verb == "keep")]
            if not kept[side]:
                raise ValueError(
                    f"{flag_of(key)} is {text}, which removes all {side} layers; keep at least one layer."
                )
    if all(len(kept[side]) == size for side, size in sizes.items()):
        raise ValueError(
            "no layer would be removed; give --drop-layers or --keep-layers, or --encoder-drop-layers or "
            "--encoder-keep-layers."
        )
    return kept


@one_file
def _pregate(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Enable pre-gating: the gate of each MoE layer reads the input of the MoE layer N layers earlier.

    The gates of the first N MoE layers of the encoder and decoder read their own layer's input. Weights
    stay the same. Fine-tune the new checkpoint before use, with --finetune-from-model and --moe-pregate N.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert import models

    saved, ahead = SavedModel.open(inputs[0]), arguments.moe_pregate
    for line in models.pregate(saved, ahead):
        print(line)
    return saved, f"; fine-tune it with --finetune-from-model and --moe-pregate {ahead}"


def _members(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Write each member of an ensemble as a checkpoint.

    To average the members' probabilities again, call fairseq-generate with
    --path FOLDER/member0.pt:FOLDER/member1.pt:…. Stock fairseq can load a member if it has the member's
    architecture.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert import models

    saved = SavedModel.open(inputs[0])
    paths = [output / f"member{m}.pt" for m in range(models.ensemble_size(saved))]
    output.mkdir(exist_ok=True)
    for path in paths:
        refuse_output(path, inputs, arguments.overwrite)
    models.write_members(saved, paths)
    text = f"/member0.pt to {paths[-1].name}: {saved.options['ensemble_arch']}{NEW_RUN}"
    if layer := saved.options.get("ensemble_share_after"):
        text += f"\ntheir outputs differ from the ensemble, in which members shared the features of {layer}"
    return text


KINDS = (
    Conversion(
        name="upcycle",
        convert=_upcycle,
        example="dense.pt --output moe.pt --moe-expert-count 8 --moe-freq 2",
        source="the dense checkpoint",
        options=tuple(
            option(item.flag, f"{item.text} [{item.default}]", type=item.type, default=item.default)
            for item in options_in(Variation)
        ),
        of_model=OPTIONS,
    ),
    Conversion(
        name="student",
        convert=_student,
        example="teacher.pt --output student.pt --drop-layers 1,3",
        source="a dense or MoE checkpoint",
        exclusive=tuple(
            tuple(
                option(f"--{prefix}{verb}-layers", f"the layers of {side} to {verb}, such as 1,3", "LAYERS")
                for verb in ("drop", "keep")
            )
            for side, prefix in (
                ("the decoder, or of an encoder-only model,", ""),
                ("the encoder", "encoder-"),
            )
        ),
    ),
    Conversion(
        name="pregate",
        convert=_pregate,
        example="moe.pt --output pregated.pt --moe-pregate 1",
        source="a MoE checkpoint without pre-gating",
        options=(option("--moe-pregate", "distance in MoE layers", type=int, required=True),),
    ),
    Conversion(
        name="members",
        convert=_members,
        example="SAVE/checkpoint_best.pt --output members",
        source="a checkpoint of --arch ensemble_of",
        output="the folder to write into",
        is_folder=True,
    ),
)
