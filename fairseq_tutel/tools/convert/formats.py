"""Command lines of `convert` between files: sharded and full, safetensors, Meta, Tutel, Swin."""

import argparse
from pathlib import Path
from typing import Any

from fairseq_tutel.checkpoint.quantized import EXPERT_DTYPES
from fairseq_tutel.checkpoint.saved import SavedModel, write_all
from fairseq_tutel.convert import meta, safetensors_folder, swin, swin_experts, tutel
from fairseq_tutel.convert.sharded import to_full, to_sharded
from fairseq_tutel.files.small import printable
from fairseq_tutel.kernels.activations import ACTIVATIONS
from fairseq_tutel.options.option import UNITS, bytes_of
from fairseq_tutel.tools.arguments import (
    add_conversion,
    add_files,
    add_overwrite,
    output_path,
    refuse_output,
)

SHARDED = """
convert sharded, convert full: convert between a sharded checkpoint and one file. A training run reads both.
--expert-dtype quantizes the experts' matrices; int8 and int4 have a scale for each row. The file holds the
quantization error, which `inspect` prints. Optimizer state keeps its dtype. `convert full` of a sharded
checkpoint needs free disk space for about twice its output.
"""
SAFETENSORS = """
convert safetensors, convert from-safetensors: write the weights of a checkpoint into a folder of
safetensors, and back. options.json in the folder holds what fairseq needs to build the model. Optimizer
state and data position are left out.
"""
META = """
Convert a checkpoint of Meta's moe branch of fairseq, with the architecture transformer_lm… or transformer….
The new one computes the same. Weights and moments keep their bits.
"""
TUTEL = """
Convert the files that ranks saved of a model with Tutel's moe_layer into one file: a state dict, for a
model with fairseq_tutel.moe_layer with the same arguments; or a checkpoint of Tutel's fairseq example, as
one of moe_transformer_lm or moe_transformer.
"""
SWIN = """
convert swin: convert a checkpoint that microsoft/Swin-Transformer released: Swin V2, or SwinV2-MoE with its
experts. For experts name X.pth, and keep X.pth.master and X.pth.rank0, X.pth.rank1, ... together.
"""


def add_to(kinds: Any) -> None:
    """Add the conversions to the command line."""
    _add_sharded(kinds)
    _add_safetensors(kinds)
    _add_meta(kinds)
    _add_tutel(kinds)
    _add_swin(kinds)


def _add_sharded(kinds: Any) -> None:
    text = "move experts to files of their own, next to the checkpoint"
    sharded = add_conversion(kinds, "sharded", _to_sharded, text, SHARDED, "a checkpoint")
    sharded.add_argument(
        "--expert-dtype",
        choices=EXPERT_DTYPES,
        help="quantize the experts' matrices [keep their dtype]",
    )
    text = "move everything to one file"
    add_conversion(kinds, "full", _to_full, text, SHARDED, "a checkpoint")


def _to_sharded(arguments: argparse.Namespace, source: Path, output: Path) -> None:
    saved = SavedModel.open(source, keep_shards=True)
    errors = to_sharded(saved, output, arguments.expert_dtype or "")
    for name, (relative, worst) in errors.items():
        print(f"{name}: relative error {relative:.2e}, of the worst row {worst:.2e}")
    print(f"wrote {output}")


def _to_full(arguments: argparse.Namespace, source: Path, output: Path) -> None:
    to_full(SavedModel.open(source, keep_shards=True), output)
    print(f"wrote {output}")


def _add_safetensors(kinds: Any) -> None:
    text = "write the weights to a folder of safetensors, with the options as JSON"
    parser = kinds.add_parser("safetensors", help=text, description=SAFETENSORS)
    add_files(parser, "a checkpoint", "the folder to write", "FOLDER")
    text = "maximum size of a file; a larger weight has a file of its own [5GB]"
    parser.add_argument("--max-shard-size", default="5GB", metavar="BYTES", help=text)
    parser.set_defaults(convert=_to_safetensors)
    text = "make a checkpoint of such a folder"
    add_conversion(kinds, "from-safetensors", _from_safetensors, text, SAFETENSORS, "the folder")


def _to_safetensors(arguments: argparse.Namespace) -> None:
    size, output = arguments.max_shard_size, Path(arguments.output)
    limit = bytes_of(size)
    if not limit:
        raise ValueError(
            f"--max-shard-size is {size}; give bytes with a unit, as 5GB ({', '.join(UNITS)})."
        )
    _refuse_folder(output, arguments.overwrite)
    saved = SavedModel.open(Path(arguments.input), keep_shards=True)
    count = safetensors_folder.to_folder(saved, output, limit)
    print(f"wrote {output}: {count} file{'s' * (count > 1)} of weights")


def _refuse_folder(output: Path, overwrite: bool) -> None:
    index = safetensors_folder.INDEX
    if not output.parent.is_dir():
        raise ValueError(f"--output is {output}; give the name of a folder in an existing one.")
    if output.is_symlink() or (output.exists() and not overwrite):
        raise ValueError(f"--output {output} exists; give another name, or add --overwrite.")
    if output.exists() and not (output / index).is_file():
        raise ValueError(f"--output {output} holds no {index}, and is not replaced; give another.")


def _from_safetensors(arguments: argparse.Namespace, source: Path, output: Path) -> None:
    safetensors_folder.from_folder(source).write(output)
    print(f"wrote {output}; start a new training run from it")


def _add_meta(kinds: Any) -> None:
    text = "from Meta's moe branch of fairseq"
    parser = kinds.add_parser("meta", help=text, description=META)
    files = "checkpoint_best-shared.pt and checkpoint_best-rank-0.pt, …"
    add_files(parser, f"checkpoint_best.pt or checkpoint_best, for {files}")
    parser.set_defaults(convert=_from_meta)


def _from_meta(arguments: argparse.Namespace) -> None:
    output = output_path(arguments.output)
    paths = meta.files_of(arguments.input)
    refuse_output(output, paths, arguments.overwrite)
    saved, notes = meta.read(paths)
    saved.write(output)
    _print_notes(notes, output)


def _add_tutel(kinds: Any) -> None:
    parser = kinds.add_parser("tutel", help="from Tutel", description=TUTEL)
    parser.add_argument(
        tutel.FLAG,
        required=True,
        metavar="PREFIX",
        help="PREFIX0-of-N, PREFIX1-of-N, …; or a pattern with {rank} and {size}; or, with --input-size 1, "
        "the name of the one file, such as Tutel's gather writes",
    )
    parser.add_argument(
        "--input-size", required=True, type=int, metavar="N", help="number of ranks that saved"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    add_overwrite(parser)
    parser.add_argument(
        "--namespace",
        metavar="KEYS",
        help="keys of the weights in a file, joined by / [model, if it exists]",
    )
    parser.add_argument(
        "--layer",
        choices=tutel.LAYERS,
        default=tutel.LAYERS[0],
        help="class of the layers of a state dict here [moe_layer]",
    )
    parser.add_argument(
        "--default-num-global-experts",
        type=int,
        metavar="E",
        help="number of experts of every layer, for files of an older Tutel, which lack it",
    )
    parser.add_argument(
        "--expert-activation",
        choices=ACTIVATIONS,
        default="linear",
        help="activation of the experts of a fairseq checkpoint; Tutel's example has none, which is "
        "linear [linear]",
    )
    parser.set_defaults(convert=_from_tutel)


def _from_tutel(arguments: argparse.Namespace) -> None:
    pattern, size = arguments.input_prefix, arguments.input_size
    output = output_path(arguments.output)
    if size < 1:
        raise ValueError(f"--input-size is {size}; give the number of ranks that saved, at least 1.")
    paths = [tutel.rank_file(pattern, rank, size) for rank in range(size)]
    if size == 1 and Path(pattern).is_file():
        paths = [Path(pattern)]
    refuse_output(output, paths, arguments.overwrite)
    content, notes = tutel.from_tutel(
        paths,
        arguments.namespace,
        arguments.default_num_global_experts,
        arguments.layer,
        arguments.expert_activation,
    )
    write_all([(output, content)])
    _print_notes(notes, output)


def _print_notes(notes: list[str], output: Path) -> None:
    for note in notes:
        print(printable(f"note: {note}".replace("\n", "\\n")))
    print(f"wrote {output}")


def _add_swin(kinds: Any) -> None:
    text = "from a released Swin V2"
    parser = add_conversion(kinds, "swin", _from_swin, text, SWIN, "the released .pth file")
    parser.add_argument(
        "--classes",
        type=int,
        metavar="N",
        help="replace the released head by one of zeros for N classes, to fine-tune",
    )
    parser.add_argument(
        "--class-map",
        type=Path,
        metavar="FILE",
        help="keep these classes of the head: a released class number per line, as map22kto1k.txt has",
    )


def _from_swin(arguments: argparse.Namespace, path: Path, output: Path) -> None:
    if arguments.classes is not None and arguments.classes < 1:
        raise ValueError(f"--classes is {arguments.classes}; give a number of at least 1.")
    if arguments.classes is not None and arguments.class_map is not None:
        raise ValueError("--classes and --class-map are both given; drop one.")
    files = swin_experts.files_of(path)
    refuse_output(output, [file for own in files for file in own], arguments.overwrite)
    ranks, options = swin_experts.open_ranks(files)
    made = swin.from_swin(ranks, options, arguments.classes, arguments.class_map)
    made.saved.write(output)
    weights = made.saved.weights
    classes = weights["head.weight"].shape[0]
    channels = weights["patch_embed.proj.weight"].shape[1]
    size = made.image_size
    print(
        f"wrote {output}: {made.saved.name('model')}, form {made.config.form}, "
        f"{sum(t.numel() for t in weights.values()):,} parameters, {classes} classes, images of "
        f"{channels} x {size} x {size}"
    )
    if made.expert_options:
        labels = ", ".join(layer.label for layer in made.saved.layers if layer.has_experts)
        found = made.saved.options
        print(
            f"{found['moe_expert_count']} experts, top-{found['moe_top_k']}, "
            f"{found['moe_gate_type']} gate, in {labels}"
        )
