"""The tool convert converts checkpoints from or to other systems or kinds of models."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fairseq_tutel.checkpoint.options import EXPERT_DTYPES
from fairseq_tutel.moe.config import ACTIVATIONS
from fairseq_tutel.option import NOT_NEGATIVE, POSITIVE, UNITS, bytes_of, options_in
from fairseq_tutel.option import Option as TableOption
from fairseq_tutel.option import option as table_option
from fairseq_tutel.plugin.options import options_of
from fairseq_tutel.tools.arguments import refuse_output
from fairseq_tutel.tools.parser import add_input, add_options, add_output
from fairseq_tutel.vision.options import SwinExpertsConfig

NEW_RUN = "; start a new training run from it"
# A command-line flag, and the keyword arguments of the flag's add_argument call.
Option = tuple[str, dict[str, Any]]
# Options of `convert upcycle` for the experts.
OF_EXPERTS = tuple(
    item for item in (*options_of("model"), *options_in(SwinExpertsConfig)) if item.theme != "Older names"
)


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Options of `convert upcycle` that change the copies of an FFN or of experts, and the gates."""

    seed: int = table_option(1, "random seed for the gates and for all random changes", of="tool")
    reinitialize: float = table_option(
        0.0,
        "fraction of each expert's hidden units to reinitialize with the mean and deviation of their old "
        "weights (Drop-Upcycling, Nakamura et al. 2025, uses 0.5)",
        of="tool",
        rule=(lambda v: 0 <= v <= 1, "give a number from 0 to 1"),
    )
    gate_scale: float = table_option(
        1.0,
        "factor for the gates' initial weights; smaller values give more even probabilities",
        of="tool",
        rule=POSITIVE,
    )
    expert_noise: float = table_option(
        0.01,
        "standard deviation of the noise in copies of a MoE model's experts, as a fraction of "
        "each tensor's root mean square; the first of an expert's copies has no noise",
        of="tool",
        rule=NOT_NEGATIVE,
    )
    gate_spread: float = table_option(
        10.0,
        "standard deviation of the number added to the gate logits of a copy of a MoE model's experts, for "
        "a token with root mean square 1; larger values change the outputs less, and raise the z loss",
        of="tool",
        rule=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A subcommand of the tool `convert`, with its function, help and options."""

    name: str
    # A conversion function in the form MODULE:FUNCTION, where MODULE is a module in fairseq_tutel.convert.
    # The arguments of a conversion function are the parsed options, input files and output path. A
    # conversion function returns a text to print.
    call: str
    text: str
    # The arguments of an example command, after the subcommand's name.
    example: str
    source: str = "a checkpoint"
    # The input is a "checkpoint" (a file or --save-dir), a "folder", or "files" (listed by `inputs_of`).
    inputs: str = "checkpoint"
    # The name of the parsed input argument; the help shows the name in upper case.
    key: str = "input"
    # An older flag for the input, which is still accepted.
    former: str = "--input"
    # The help text of --output, which names a folder if `is_folder`.
    output: str = "the checkpoint to write"
    is_folder: bool = False
    options: tuple[Option, ...] = ()
    # Mutually exclusive options, of which exactly one must be given.
    one_of: tuple[Option, ...] = ()
    # Mutually exclusive options, of which at most one may be given.
    exclusive: tuple[Option, ...] = ()
    # Options that are saved with the model.
    of_model: tuple[TableOption, ...] = ()

    def add_to(self, kinds: Any) -> None:
        """Add this kind of conversion as a subcommand of the tool `convert`."""
        first_line = self.text.partition("\n")[0].rstrip(".")
        parser = kinds.add_parser(self.name, help=first_line, description=self.text, example=self.example)
        add_input(parser, self.source, self.key, self.former)
        add_output(parser, self.output, required=True, is_folder=self.is_folder)
        groups: list[tuple[Any, Sequence[Option]]] = [(parser, self.options)]
        if self.one_of:
            groups.append((parser.add_mutually_exclusive_group(required=True), self.one_of))
        if self.exclusive:
            groups.append((parser.add_mutually_exclusive_group(), self.exclusive))
        for group, options in groups:
            for flag, keywords in options:
                group.add_argument(flag, **keywords)
        if self.of_model:
            title = "options of the experts, as for fairseq-train; they are saved with the model"
            add_options(parser.add_argument_group(title), self.of_model)
        parser.set_defaults(run=self.run)

    def run(self, arguments: argparse.Namespace) -> None:
        """Check the output path, convert the checkpoint, and print the output path and a summary."""
        file, _, function = self.call.partition(":")
        module, output = import_module(f"fairseq_tutel.convert.{file}"), arguments.output
        inputs = module.inputs_of(arguments) if self.inputs == "files" else [Path(arguments.input)]
        if self.inputs == "checkpoint":
            from fairseq_tutel.checkpoint.files import checkpoint_in

            inputs = [checkpoint_in(inputs[0], "INPUT")]
        if not self.is_folder:
            refuse_output(output, inputs, arguments.overwrite)
        elif not output.parent.is_dir() or (output.exists() and not output.is_dir()):
            raise ValueError(f"--output is {output}; give a folder whose parent folder exists.")
        print(f"wrote {output}{getattr(module, function)(arguments, inputs, output)}")


def size_limit(arguments: argparse.Namespace) -> int:
    """Return the value of --max-shard-size in bytes; raise ValueError if the value is not a size."""
    limit = bytes_of(arguments.max_shard_size)
    if not limit:
        raise ValueError(
            f"--max-shard-size is {arguments.max_shard_size}; give a size with a unit "
            f"({', '.join(UNITS)}), such as 5GB."
        )
    return limit


def option(flag: str, help: str, metavar: str | None = None, **keywords: Any) -> Option:
    """Return a flag and its add_argument keywords; the default metavar is N for int and X for float."""
    usual = {int: "N", float: "X"}.get(keywords.get("type", str))
    if metavar or usual:
        keywords["metavar"] = metavar or usual
    return flag, {"help": help, **keywords}


FOLDER: dict[str, Any] = {"output": "the folder to write", "is_folder": True}
WITH_EXPERTS = "a checkpoint with experts"
STATISTICS = "read loads and importances from this file of `tokens --output-statistics`"
GLOBALLY = (
    "keep --share of all layers' experts; each layer keeps the same share of its total load or importance"
)
PREFIX = (
    "start of the names of the ranks' files PREFIX0-of-N, PREFIX1-of-N, …; or a pattern with {rank} and "
    "{size}; or, with --input-size 1, the name of a single file"
)
MAX_SIZE = option(
    "--max-shard-size", "maximum size of a file; a larger weight gets its own [5GB]", "BYTES", default="5GB"
)
KINDS = (
    Conversion(
        name="upcycle",
        call="upcycle:run",
        text="""Make a Mixture-of-Experts checkpoint from a dense checkpoint, or add experts to one.

In every chosen layer, each expert is a copy of the feed-forward network (Komatsuzaki et al. 2022, Sparse
Upcycling). With a smaller --moe-expert-ffn-dim, each expert is a part of it (He et al. 2024). Gates are
initialized. The tool prints whether the initial outputs equal the dense model's outputs. If the checkpoint
has experts already, each expert is copied, so --moe-expert-count must be a multiple of their number. Start
a new training run from the file with --finetune-from-model.""",
        example="dense.pt --output moe.pt --moe-expert-count 8 --moe-freq 2",
        source="a dense or MoE checkpoint",
        options=tuple(
            option(item.flag, f"{item.text} [{item.default}]", type=item.type, default=item.default)
            for item in options_in(Variation)
        ),
        of_model=OF_EXPERTS,
    ),
    Conversion(
        name="student",
        call="models:student",
        text="""Remove layers from a dense or MoE checkpoint.

Train the new checkpoint with --finetune-from-model and the printed options. --criterion moe_distillation
trains it to imitate the original model. --moe-freq F selects every F-th layer for experts, so the remaining
MoE layers must be every F-th layer for some F.""",
        example="teacher.pt --output student.pt --drop-layers 1,3",
        source="a dense or MoE checkpoint",
        options=(
            option(
                "--drop-layers", "layers to remove from the decoder or only stack, such as 1,3", "LAYERS"
            ),
            option("--encoder-drop-layers", "the layers of the encoder to remove", "LAYERS"),
        ),
    ),
    Conversion(
        name="pregate",
        call="models:pregate",
        text="""Enable pre-gating: each gate reads the input of the MoE layer N layers earlier.

The gates of the first N MoE layers of the encoder and decoder read their own layer's input. Weights stay
the same. Fine-tune the new checkpoint before use, with --finetune-from-model and --moe-pregate N.""",
        example="moe.pt --output pregated.pt --moe-pregate 1",
        source="a MoE checkpoint without pre-gating",
        options=(option("--moe-pregate", "distance in MoE layers", type=int, required=True),),
    ),
    Conversion(
        name="members",
        call="models:members",
        text="""Write each member of an ensemble as a checkpoint.

To average the members' probabilities again, call fairseq-generate with
--path FOLDER/member0.pt:FOLDER/member1.pt:…. Stock fairseq can load a member if it has the member's
architecture.""",
        example="SAVE/checkpoint_best.pt --output members",
        source="a checkpoint of --arch ensemble_of",
        output="the folder to write into",
        is_folder=True,
    ),
    Conversion(
        name="prune",
        call="experts:prune",
        text="""Remove experts, chosen by ID, by load or by importance.

If all experts of a token remain, and the token's weights are normalized to the sum 1, the token's output
does not change. For a top-k of at least 2, weights are normalized by default.

The importance of an expert is activity * exp(confidence) (Koishekenov et al. 2023). Activity is the share
of tokens whose first choice is the expert. Confidence is the expert's mean gate probability over these
tokens. `tokens --output-statistics` writes both to a file.""",
        example="moe.pt --share 0.5 --by importance --statistics use.json --output pruned.pt",
        source=WITH_EXPERTS,
        one_of=(
            option("--drop", "experts to remove: 3,5 or decoder_1=3,5 encoder_3=0", "IDS", nargs="+"),
            option("--share", "share of experts to keep, by score; at least top-k per layer", type=float),
        ),
        options=(
            option("--moe-top-k", "new number of experts per token [unchanged]", "K", type=int),
            option("--by", "score of an expert [load]", choices=("load", "importance"), default="load"),
            option("--globally", GLOBALLY, action="store_true"),
            option("--keep-for", "language pairs in --statistics, such as de-en,fr-en [all]", "PAIRS"),
        ),
        exclusive=(
            option("--log", "read the loads from this training log, or from that in --save-dir", "PATH"),
            option("--load", "loads of experts: 0.5,2,1,0.5 or decoder_1=0.5,1.5", "LOADS", nargs="+"),
            option("--statistics", STATISTICS, "FILE", type=Path),
        ),
    ),
    Conversion(
        name="dense",
        call="experts:dense",
        text="""Make a dense checkpoint for stock fairseq from one or several experts per layer.

In every MoE layer, the chosen experts become one feed-forward network: their hidden units are concatenated,
with even weights. Shared experts become part of this network. Gates are removed. The tool prints the layers
whose outputs may change.""",
        example="moe.pt --experts all --output dense.pt",
        source=WITH_EXPERTS,
        options=(
            option(
                "--experts", "IDs: 0,1, all or decoder_1=3 decoder_3=0", "IDS", nargs="+", required=True
            ),
        ),
    ),
    Conversion(
        name="vocabulary",
        call="vocabulary:run",
        text="""Change the dictionary of a dense or MoE checkpoint, or add words or languages.

Symbols keep their embeddings and output weights. The row of a new word is the mean of the old words' rows.
The row of a new language's token is the mean of the other languages' rows. --add-words and --add-languages
write new dictionaries next to the output. Train the new checkpoint with --finetune-from-model.""",
        example="SAVE/checkpoint_best.pt --output new/model.pt --add-languages nld_Latn --like deu_Latn",
        source="a dense or MoE checkpoint",
        options=(
            option("--add-languages", "languages to append to --langs, in order", "LANG", nargs="+"),
            option("--like", "language whose token is copied for new languages", "LANG"),
            option("--old-data", "folder of old dictionaries [the training run's]", "FOLDER", type=Path),
        ),
        exclusive=(
            option("--data", "folder of the new dictionaries", "FOLDER", type=Path),
            option("--add-words", "text file with words to append, one per line", "FILE", type=Path),
        ),
    ),
    Conversion(
        name="sharded",
        call="sharded:run_sharded",
        text="""Move experts to shard files next to the checkpoint.

A training run reads both sharded and full checkpoints. --expert-dtype quantizes the experts' matrices; int8
has a scale for each row, and int4 one for 64 values of a row (or for each row, if a dimension of the matrix
is not a multiple of 64). The checkpoint stores the quantization error, which `inspect` prints. Optimizer
state keeps its dtype.""",
        example="SAVE/checkpoint_best.pt --output SAVE/sharded.pt",
        options=(option("--expert-dtype", "quantize experts [keep their dtype]", choices=EXPERT_DTYPES),),
    ),
    Conversion(
        name="full",
        call="sharded:run_full",
        text="""Write a sharded checkpoint as one file.

This temporarily needs free disk space of about twice the output's size.""",
        example="SAVE/checkpoint_best.pt --output full.pt",
    ),
    Conversion(
        name="meta",
        call="meta:run",
        text="""Convert a checkpoint of Meta's moe branch of fairseq.

The architecture must be transformer_lm… or transformer…. The new checkpoint gives the same outputs. Weights
keep their bits; optimizer state and data position are left out. If the model was trained with
--add-data-source-prefix-tags, dictionaries with these tags are written next to the checkpoint.""",
        example="META/checkpoint_best.pt --output model.pt",
        source="common name of the files: best.pt or best for best-shared.pt, best-rank-0.pt, …",
        inputs="files",
        options=(option("--dictionary", "dictionary, for tags [the training run's]", "FILE", type=Path),),
    ),
    Conversion(
        name="tutel",
        call="tutel:run",
        text="""Convert a checkpoint or state dict of a model with Tutel's moe_layer.

The files of all ranks become one file. A state dict becomes a state dict for the same model with
fairseq_tutel.moe_layer. A checkpoint of Tutel's fairseq example becomes a checkpoint of moe_transformer_lm
or moe_transformer.""",
        example="STATES/model- --input-size 8 --output model.pt",
        source=PREFIX,
        inputs="files",
        key="prefix",
        former="--input-prefix",
        options=(
            option("--input-size", "number of ranks that saved the model", type=int, required=True),
            option("--namespace", "keys that lead to the weights, as a/b [model, if it exists]", "KEYS"),
            option(
                "--expert-activation",
                "activation of the experts in a fairseq checkpoint [linear]",
                choices=ACTIVATIONS,
                default="linear",
            ),
        ),
    ),
    Conversion(
        name="swin",
        call="swin:run",
        text="""Convert a released Swin V2 or SwinV2-MoE of microsoft/Swin-Transformer.

For a SwinV2-MoE, give X.pth as INPUT, and keep X.pth.master and X.pth.rank0, X.pth.rank1, ... in the same
folder.""",
        example="swinv2_tiny_patch4_window8_256.pth --output swin.pt",
        source="the released .pth file",
        inputs="files",
        options=(option("--classes", "replace the head by a zero head for N classes", type=int),),
    ),
    Conversion(
        name="from-hf",
        call="released.from_hf:run",
        text="""Convert a model in the format of Hugging Face to a folder with a fairseq checkpoint.

The folder has the checkpoint model.pt, its dictionary and its BPE files. Weights keep their bits and their
dtype. No pickled code runs. docs/released.md lists the models.""",
        example="nllb-200-distilled-600M --output nllb",
        source="the folder with config.json, weights and tokenizer files",
        inputs="folder",
        options=(
            option(
                "--expert-dtype", "dtype of experts [keep their dtype]", choices=("fp32", *EXPERT_DTYPES)
            ),
            option("--keep-experts", "JSON file with the experts to keep [all experts]", "FILE", type=Path),
            option("--keep-for", "language pairs of --keep-experts, such as eng_Latn-fra_Latn", "PAIRS"),
        ),
        **FOLDER,
    ),
    Conversion(
        name="to-hf",
        call="released.to_hf:run",
        text="""Convert a fairseq checkpoint to a folder in the format of Hugging Face.

The model must have the form of a released model, which docs/released.md lists. If it has not, the tool
prints the option or tensor that differs. Tokenizer files next to the checkpoint are copied.""",
        example="SAVE/checkpoint_best.pt --output exported",
        options=(option("--tokenizer", "folder of tokenizer files [the input's]", "FOLDER"), MAX_SIZE),
        **FOLDER,
    ),
)


def add_to(tools: Any) -> None:
    """Add the tool `convert` and all of its subcommands to the command line."""
    example = "sharded SAVE/checkpoint_best.pt --output SAVE/sharded.pt"
    parser = tools.add_parser("convert", description=__doc__, example=example)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for conversion in KINDS:
        conversion.add_to(kinds)
