"""Command lines of `convert` that change the kind of a model: upcycle, student, pregate, members."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fairseq_tutel import plugin
from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.convert import members, pregate, student
from fairseq_tutel.convert.configs import counts_text
from fairseq_tutel.convert.upcycle import upcycle
from fairseq_tutel.convert.upcycle_layer import Variation, differences
from fairseq_tutel.moe.option_table import options_of
from fairseq_tutel.options.option import flag_of, options_in
from fairseq_tutel.tools.arguments import add_conversion, add_files, refuse_output
from fairseq_tutel.vision.options import SwinExpertsConfig

UPCYCLE = """
convert upcycle: make a Mixture-of-Experts checkpoint of a dense one. In every chosen layer, each expert is
a copy of the feed-forward network (Komatsuzaki et al. 2022, Sparse Upcycling), or a part of it with a
smaller --moe-expert-ffn-dim (He et al. 2024). Gates are initialized. The tool prints whether the initial
outputs are those of the dense model. Start a new training run from the file, by --finetune-from-model.
"""
STUDENT = """
convert student: remove layers of a checkpoint, dense or with experts. Train the new one by
--finetune-from-model, with the options that are printed. --criterion moe_distillation trains it to imitate
the whole one. --moe-freq F selects every F-th layer for experts; the remaining layers must fit some F.
"""
PREGATE = """
convert pregate: let the gate of each MoE layer read the input of the MoE layer N before it in its stack;
the first N read their own. Weights stay the same, so fine-tune the new checkpoint before use, by
--finetune-from-model with --moe-pregate N.
"""
MEMBERS = """
convert members: write each member of an ensemble as a checkpoint. fairseq-generate averages their
probabilities again with --path FOLDER/member0.pt:FOLDER/member1.pt:…. Stock fairseq opens them if it has
their architecture.
"""
# Fields of `Variation`: name, default, metavar, help, check of a value, and its description.
VARIATIONS: tuple[tuple[str, float, str, str, Callable[[float], bool], str], ...] = (
    (
        "perturb", 0, "STD",
        "Gaussian noise on the experts' weights, in standard deviations of the matrix",
        lambda v: 0 <= v < 100, "a finite number, at least 0",
    ),
    (
        "reinitialize", 0, "SHARE",
        "fraction of each expert's hidden units to initialize again with the statistics of the old ones "
        "(Drop-Upcycling, Nakamura et al. 2025, with 0.5)",
        lambda v: 0 <= v <= 1, "a number from 0 to 1",
    ),
    (
        "gate_scale", 1, "X",
        "factor for the gates' initial weights; smaller values give more even probabilities",
        lambda v: 0 < v < 1e6, "a number above 0",
    ),
)  # fmt: skip
OF_SWIN = options_in(SwinExpertsConfig)
NEW_RUN = "start a new training run from it"


def add_to(kinds: Any) -> None:
    """Add the conversions to the command line."""
    _add_upcycle(kinds)
    _add_student(kinds)
    text = "let gates read the input of an earlier MoE layer"
    source = "a conventional checkpoint with experts"
    parser = add_conversion(kinds, "pregate", _pregate, text, PREGATE, source)
    text = "distance in MoE layers"
    parser.add_argument("--moe-pregate", type=int, required=True, metavar="N", help=text)
    text = "write each member of an ensemble as a checkpoint"
    parser = kinds.add_parser("members", help=text, description=MEMBERS)
    add_files(parser, "a checkpoint of --arch ensemble_of", "the folder to write into", "FOLDER")
    parser.set_defaults(convert=_members)


def _add_upcycle(kinds: Any) -> None:
    text = "make a MoE checkpoint of a dense one, with copies of its feed-forward networks as experts"
    parser = add_conversion(kinds, "upcycle", _upcycle, text, UPCYCLE, "the dense checkpoint")
    text = "seed of gates and of all random changes [1]"
    parser.add_argument("--seed", type=int, default=1, metavar="N", help=text)
    for key, default, metavar, text, _, _ in VARIATIONS:
        parser.add_argument(
            flag_of(key), type=float, default=default, metavar=metavar, help=f"{text} [{default:g}]"
        )
    parser.late = _add_model_options


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    plugin.register()
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    from fairseq_tutel.plugin.registration.flags import EncoderDecoderOptions, made

    group = parser.add_argument_group("the experts, as for fairseq-train; saved with the model")
    for options in (EncoderDecoderOptions, made("SwinExpertsOptions", OF_SWIN)):
        gen_parser_from_dataclass(group, options(), delete_default=True, with_prefix="")


def _upcycle(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    values = {key: getattr(arguments, key) for key, *_ in VARIATIONS}
    for key, _, _, _, is_valid, valid in VARIATIONS:
        if not is_valid(values[key]):
            raise ValueError(f"{flag_of(key)} is {values[key]:g}; give {valid}.")
    how = Variation(seed=arguments.seed, **values)
    keys = [option.key for option in (*options_of("model"), *OF_SWIN)]
    given = {key: getattr(arguments, key) for key in keys}
    # An absent option is None or, for a switch, False. 0 is a value.
    given = {key: v for key, v in given.items() if v is not None and v is not False}
    saved = SavedModel.open(path)
    configs = upcycle(saved, given, how)
    saved.write(output)
    counts = counts_text([config.num_experts for config in configs.values()])
    first, labels = next(iter(configs.values())), ", ".join(layer.label for layer in configs)
    print(
        f"wrote {output}: {saved.name('model')}, {counts} experts of {first.hidden_dim}, "
        f"top-{first.top_k}, in {labels}"
    )
    reasons = dict.fromkeys(r for config in configs.values() for r in differences(config, how))
    if reasons:
        print(f"its first output is not the dense model's: {'; '.join(reasons)}")
    else:
        print("its first output is the dense model's, to rounding")


def _add_student(kinds: Any) -> None:
    source = "a checkpoint, dense or with experts"
    parser = add_conversion(kinds, "student", _student, "remove layers", STUDENT, source)
    for side, prefix in (("decoder's, or of the only side", ""), ("encoder's", "encoder-")):
        which = parser.add_mutually_exclusive_group()
        for verb in ("drop", "keep"):
            text = f"the {side} layers to {verb}, as 1,3"
            which.add_argument(f"--{prefix}{verb}-layers", metavar="LAYERS", help=text)


def _student(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    saved = SavedModel.open(path)
    sides = student.sides_of(saved)
    kept = _kept(arguments, {side: len(layers) for side, layers in sides.items()})
    changed = student.keep_layers(saved, kept)
    saved.write(output)
    for side, layers in sides.items():
        numbers = ", ".join(map(str, kept[side]))
        print(f"{side}: {len(kept[side])} of {len(layers)} layers: {numbers}")
    words = " ".join(f"{flag_of(key)} {value}" for key, value in changed.items() if value is not None)
    print(f"wrote {output}; {NEW_RUN}, by --finetune-from-model, with {words}")


def _kept(arguments: argparse.Namespace, sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the numbers of the layers to keep on each side, in order.

    Raises:
        ValueError: no layer is removed, none of a side is left, or a layer does not exist.
    """
    main = "decoder" if "decoder" in sizes else "encoder"
    kept = {side: list(range(size)) for side, size in sizes.items()}
    for prefix, side in (("", main), ("encoder_", "encoder")):
        for verb in ("drop", "keep"):
            text = getattr(arguments, f"{prefix}{verb}_layers")
            if text is None:
                continue
            flag = flag_of(f"{prefix}{verb}_layers")
            if prefix and len(sizes) == 1:
                raise ValueError(
                    f"{flag} is {text}, but the model has one side; give {flag_of(verb)}-layers."
                )
            named = _numbers(flag, text, sizes[side], side)
            kept[side] = [i for i in range(sizes[side]) if (i in named) == (verb == "keep")]
            if not kept[side]:
                raise ValueError(f"{flag} is {text}, which leaves no layer of the {side}; leave one.")
    if all(len(kept[side]) == size for side, size in sizes.items()):
        raise ValueError(
            "no layer would be removed; give --drop-layers, --keep-layers, or those of the encoder."
        )
    return kept


def _numbers(flag: str, text: str, count: int, side: str) -> set[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{flag} is {text!r}; give numbers of layers with commas between, as 1,3.")
    named = {int(part) for part in parts}
    if max(named) >= count or len(named) < len(parts):
        raise ValueError(
            f"{flag} is {text}, but the {side} has the layers 0 to {count - 1}; name some of these, once "
            "each."
        )
    return named


def _pregate(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    saved, ahead = SavedModel.open(path), arguments.moe_pregate
    for line in pregate.pregate(saved, ahead):
        print(line)
    saved.write(output)
    print(f"wrote {output}; fine-tune it by --finetune-from-model, with --moe-pregate {ahead}")


def _members(arguments: argparse.Namespace) -> None:
    source, folder = Path(arguments.input), Path(arguments.output)
    saved = SavedModel.open(source)
    size = members.ensemble_size(saved)
    if (folder.exists() and not folder.is_dir()) or not folder.parent.is_dir():
        raise ValueError(f"--output is {folder}; give the name of a folder in an existing one.")
    folder.mkdir(exist_ok=True)
    paths = [folder / f"member{m}.pt" for m in range(size)]
    for path in paths:
        refuse_output(path, [source], arguments.overwrite)
    members.write_members(saved, paths)
    arch, layer = saved.options["ensemble_arch"], saved.options.get("ensemble_share_after")
    print(f"wrote {paths[0]} to {paths[-1].name}: {arch}; start a new training run from each")
    if layer:
        print(f"their outputs are not those in the ensemble, where they shared the features of {layer}")
