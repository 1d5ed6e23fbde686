"""Conversions to another kind of model: upcycle, student, pregate, members."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert import models
from fairseq_tutel.convert.configs import counts_text
from fairseq_tutel.convert.upcycle import Variation, differences, upcycle
from fairseq_tutel.moe.option_table import options_of
from fairseq_tutel.options.option import flag_of, options_in, read, refuse_bad_values
from fairseq_tutel.tools.arguments import refuse_output
from fairseq_tutel.tools.convert.conversion import NEW_RUN, Conversion, one_file, option
from fairseq_tutel.vision.options import SwinExpertsConfig

OPTIONS = [
    item for item in (*options_of("model"), *options_in(SwinExpertsConfig)) if item.theme != "Older names"
]


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    plugin.register()
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from fairseq_tutel.plugin.registration.flags import made

    group = parser.add_argument_group("the experts, as for fairseq-train; saved with the model")
    options = made("UpcycleOptions", OPTIONS)()
    gen_parser_from_dataclass(group, options, delete_default=True, with_prefix="")


@one_file
def _upcycle(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Make a Mixture-of-Experts checkpoint of a dense one.

    In every chosen layer, each expert is a copy of the feed-forward network (Komatsuzaki et al. 2022,
    Sparse Upcycling), or a part of it with a smaller --moe-expert-ffn-dim (He et al. 2024). Gates are
    initialized. The tool prints whether the initial outputs are those of the dense model. Start a new
    training run from the file, by --finetune-from-model.
    """
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
    what = f"not the dense model's: {'; '.join(reasons)}" if reasons else "the dense model's, to rounding"
    return saved, (
        f": {saved.name('model')}, {counts} experts of {first.hidden_dim}, top-{first.top_k}, in {labels}\n"
        f"its first output is {what}"
    )


@one_file
def _student(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Remove layers of a checkpoint, dense or with experts.

    Train the new one by --finetune-from-model, with the options that are printed. --criterion
    moe_distillation trains it to imitate the whole one. --moe-freq F selects every F-th layer for experts;
    the remaining layers must fit some F.
    """
    saved = SavedModel.open(inputs[0])
    sides = models.sides_of(saved)
    kept = _kept(arguments, {side: len(layers) for side, layers in sides.items()})
    changed = models.keep_layers(saved, kept)
    for side, layers in sides.items():
        numbers = ", ".join(map(str, kept[side]))
        print(f"{side}: {len(kept[side])} of {len(layers)} layers: {numbers}")
    words = " ".join(f"{flag_of(key)} {value}" for key, value in changed.items() if value is not None)
    return saved, f"{NEW_RUN}, by --finetune-from-model, with {words}"


def _kept(arguments: argparse.Namespace, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the numbers of the layers to keep on each side, in order."""
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
                    "name some of these, once each, separated by commas, such as 1,3."
                )
            kept[side] = [i for i in range(sizes[side]) if (i in named) == (verb == "keep")]
            if not kept[side]:
                raise ValueError(
                    f"{flag_of(key)} is {text}, which leaves no layer of the {side}; leave one."
                )
    if all(len(kept[side]) == size for side, size in sizes.items()):
        raise ValueError(
            "no layer would be removed; give --drop-layers, --keep-layers, or those of the encoder."
        )
    return kept


@one_file
def _pregate(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Let the gate of each MoE layer read the input of the MoE layer N before it in its stack.

    The first N read their own. Weights stay the same, so fine-tune the new checkpoint before use, by
    --finetune-from-model with --moe-pregate N.
    """
    saved, ahead = SavedModel.open(inputs[0]), arguments.moe_pregate
    for line in models.pregate(saved, ahead):
        print(line)
    return saved, f"; fine-tune it by --finetune-from-model, with --moe-pregate {ahead}"


def _members(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Write each member of an ensemble as a checkpoint.

    fairseq-generate averages their probabilities again with --path FOLDER/member0.pt:FOLDER/member1.pt:….
    Stock fairseq opens them if it has their architecture.
    """
    saved = SavedModel.open(inputs[0])
    paths = [output / f"member{m}.pt" for m in range(models.ensemble_size(saved))]
    output.mkdir(exist_ok=True)
    for path in paths:
        refuse_output(path, inputs, arguments.overwrite)
    models.write_members(saved, paths)
    text = f"/member0.pt to {paths[-1].name}: {saved.options['ensemble_arch']}{NEW_RUN}"
    if layer := saved.options.get("ensemble_share_after"):
        text += f"\ntheir outputs are not those in the ensemble, where they shared the features of {layer}"
    return text


KINDS = (
    Conversion(
        name="upcycle",
        convert=_upcycle,
        source="the dense checkpoint",
        options=tuple(
            option(item.flag, f"{item.text} [{item.default}]", type=item.type, default=item.default)
            for item in options_in(Variation)
        ),
        late=_add_model_options,
    ),
    Conversion(
        name="student",
        convert=_student,
        source="a checkpoint, dense or with experts",
        exclusive=tuple(
            tuple(
                option(f"--{prefix}{verb}-layers", f"the layers of {side} to {verb}, as 1,3", "LAYERS")
                for verb in ("drop", "keep")
            )
            for side, prefix in (("the decoder, or the only side,", ""), ("the encoder", "encoder-"))
        ),
    ),
    Conversion(
        name="pregate",
        convert=_pregate,
        source="a conventional checkpoint with experts",
        options=(option("--moe-pregate", "distance in MoE layers", type=int, required=True),),
    ),
    Conversion(
        name="members",
        convert=_members,
        source="a checkpoint of --arch ensemble_of",
        output="the folder to write into",
        is_folder=True,
    ),
)
