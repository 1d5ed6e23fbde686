"""Defines the subcommands of `convert` that change the file format or read other systems' files."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_tutel.checkpoint.options import EXPERT_DTYPES
from fairseq_tutel.convert.commands.conversion import NEW_RUN, Conversion, one_file, one_folder, option
from fairseq_tutel.convert.options import TUTEL_LAYERS
from fairseq_tutel.files import printable
from fairseq_tutel.moe.config import ACTIVATIONS
from fairseq_tutel.option import UNITS, bytes_of
from fairseq_tutel.tools.arguments import refuse_output_folder

if TYPE_CHECKING:
    from fairseq_tutel.checkpoint.saved import SavedModel

MAX_SIZE = "maximum size of a file; a larger weight gets its own file [5GB]"
PREFIX = (
    "start of the names of the ranks' files PREFIX0-of-N, PREFIX1-of-N, …; or a pattern with {rank} and "
    "{size}; or, with --input-size 1, the name of a single file, such as the output of Tutel's gather"
)
LAYER = "class of the MoE layers that will load the converted state dict [moe_layer]"
ACTIVATION = "activation of the experts of a fairseq checkpoint; Tutel's example uses linear [linear]"
DICTIONARY = "the dictionary of a model with tags of data sources [that of the training run]"
CLASS_MAP = "keep only these classes of the head: a file with one class number per line, as map22kto1k.txt"


def _to_sharded(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Move experts to shard files next to the checkpoint.

    A training run reads both sharded and full checkpoints. --expert-dtype quantizes the experts' matrices;
    int8 has a scale for each row, and int4 one for 64 values of a row (or for each row, if a size of the
    matrix is not a multiple of 64). The checkpoint stores the quantization error, which `inspect` prints.
    Optimizer state keeps its dtype.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert import sharded

    saved = SavedModel.open(inputs[0], keep_shards=True)
    folder, errors = sharded.to_sharded(saved, output, arguments.expert_dtype or "")
    for name, (relative, worst) in errors.items():
        print(f"{name}: relative error {relative:.2e}, worst row's error {worst:.2e}")
    return f" and its experts in {folder}; copy or move the file together with this folder"


def _to_full(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Write a sharded checkpoint as one file.

    The conversion of a sharded checkpoint temporarily needs free disk space of about twice the output's
    size.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert import sharded

    sharded.to_full(SavedModel.open(inputs[0], keep_shards=True), output)
    return ""


def size_limit(arguments: argparse.Namespace) -> int:
    """Return the value of --max-shard-size in bytes; raise ValueError if it is not a size."""
    limit = bytes_of(arguments.max_shard_size)
    if not limit:
        raise ValueError(
            f"--max-shard-size is {arguments.max_shard_size}; give a size with a unit "
            f"({', '.join(UNITS)}), such as 5GB."
        )
    return limit


def _to_safetensors(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Write the weights to a folder of safetensors files.

    options.json in the folder holds everything else that fairseq needs to build the model. Optimizer state
    and data position are left out.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert import safetensors_folder

    limit = size_limit(arguments)
    refuse_output_folder(output, inputs[0], safetensors_folder.INDEX, arguments.overwrite)
    saved = SavedModel.open(inputs[0], keep_shards=True)
    count = safetensors_folder.write(saved, output, limit)
    return f": {count} file{'s' * (count > 1)} of weights"


@one_file
def _from_safetensors(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Make a checkpoint from a folder that `convert safetensors` wrote."""
    from fairseq_tutel.convert import safetensors_folder

    return safetensors_folder.read(inputs[0]), NEW_RUN


def _from_meta(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Convert a checkpoint of Meta's moe branch of fairseq.

    The architecture must be transformer_lm… or transformer…. The new checkpoint gives the same outputs.
    Weights keep their bits; optimizer state and data position are left out. If the model was trained with
    --add-data-source-prefix-tags, dictionaries with these tags are written next to the checkpoint.
    """
    from fairseq_tutel.convert import meta

    saved, notes = meta.read(inputs)
    vocabulary = meta.dictionaries(saved, arguments.dictionary)
    for name in (*vocabulary.files, *vocabulary.links):
        text, file = vocabulary.files.get(vocabulary.links.get(name, name)), output.parent / name
        if file.exists() and file.read_text() != text:
            raise ValueError(f"{file} is another dictionary; give an --output in another folder.")
    vocabulary.write(output.parent)
    saved.write(output)
    _print_notes(notes)
    beside = f" and {', '.join(vocabulary.files)}, with the tags of data sources, next to it"
    return beside * bool(vocabulary.files) + NEW_RUN


@one_file
def _from_tutel(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Convert a checkpoint or state dict of a model with Tutel's moe_layer.

    The files of all ranks become one file. A state dict becomes a state dict for the same model with
    fairseq_tutel.moe_layer. A checkpoint of Tutel's fairseq example becomes a checkpoint of
    moe_transformer_lm or moe_transformer.
    """
    from fairseq_tutel.convert import tutel

    saved, notes = tutel.read(inputs, arguments.namespace, arguments.layer, arguments.expert_activation)
    _print_notes(notes)
    return saved, ""


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        print(printable(f"note: {note}".replace("\n", "\\n")))


def _ranks_of_tutel(arguments: argparse.Namespace) -> list[Path]:
    from fairseq_tutel.convert import tutel

    size = arguments.input_size
    if size < 1:
        raise ValueError(
            f"--input-size is {size}; give the number of ranks that saved the model, at least 1."
        )
    return tutel.files_of(arguments.prefix, size)


@one_file
def _from_swin(arguments: argparse.Namespace, inputs: list[Path]) -> tuple[SavedModel, str]:
    """Convert a released Swin V2 or SwinV2-MoE of microsoft/Swin-Transformer.

    For a SwinV2-MoE, give X.pth as INPUT, and keep X.pth.master and X.pth.rank0, X.pth.rank1, ... in the
    same folder.
    """
    from fairseq_tutel.convert import swin

    if arguments.classes is not None and arguments.classes < 1:
        raise ValueError(f"--classes is {arguments.classes}; give a number of at least 1.")
    files = swin.files_of(Path(arguments.input))
    saved = swin.read(files, arguments.classes, arguments.class_map)
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
    return saved, text


def _files_of_meta(arguments: argparse.Namespace) -> list[Path]:
    from fairseq_tutel.convert import meta

    return meta.files_of(arguments.input)


def _files_of_swin(arguments: argparse.Namespace) -> list[Path]:
    from fairseq_tutel.convert import swin

    return [*chain(*swin.files_of(Path(arguments.input)))]


KINDS = (
    Conversion(
        name="sharded",
        convert=_to_sharded,
        example="SAVE/checkpoint_best.pt --output SAVE/sharded.pt",
        options=(
            option(
                "--expert-dtype", "quantize the experts' matrices [keep their dtype]", choices=EXPERT_DTYPES
            ),
        ),
    ),
    Conversion(name="full", convert=_to_full, example="SAVE/checkpoint_best.pt --output full.pt"),
    Conversion(
        name="safetensors",
        convert=_to_safetensors,
        example="SAVE/checkpoint_best.pt --output FOLDER --max-shard-size 2GB",
        output="the folder to write",
        is_folder=True,
        options=(option("--max-shard-size", MAX_SIZE, "BYTES", default="5GB"),),
    ),
    Conversion(
        name="from-safetensors",
        convert=_from_safetensors,
        example="FOLDER --output model.pt",
        source="the folder",
        inputs=one_folder,
    ),
    Conversion(
        name="meta",
        convert=_from_meta,
        example="META/checkpoint_best.pt --output model.pt",
        source="common name of the files: best.pt or best for best-shared.pt, best-rank-0.pt, …",
        inputs=_files_of_meta,
        options=(option("--dictionary", DICTIONARY, "FILE", type=Path),),
    ),
    Conversion(
        name="tutel",
        convert=_from_tutel,
        example="STATES/model- --input-size 8 --output model.pt",
        source=PREFIX,
        key="prefix",
        former="--input-prefix",
        inputs=_ranks_of_tutel,
        options=(
            option("--input-size", "number of ranks that saved the model", type=int, required=True),
            option(
                "--namespace", "keys that lead to the weights, joined by / [model, if it exists]", "KEYS"
            ),
            option("--layer", LAYER, choices=TUTEL_LAYERS, default=TUTEL_LAYERS[0]),
            option("--expert-activation", ACTIVATION, choices=ACTIVATIONS, default="linear"),
        ),
    ),
    Conversion(
        name="swin",
        convert=_from_swin,
        example="swinv2_tiny_patch4_window8_256.pth --output swin.pt",
        source="the released .pth file",
        inputs=_files_of_swin,
        exclusive=(
            (
                option("--classes", "replace the released head by a zero head for N classes", type=int),
                option("--class-map", CLASS_MAP, "FILE", type=Path),
            ),
        ),
    ),
)
