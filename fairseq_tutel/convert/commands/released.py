"""Defines the subcommands from-hf and to-hf of `convert`, for models in the format of Hugging Face."""

import argparse
from pathlib import Path

from fairseq_tutel.convert.commands.conversion import NEW_RUN, Conversion, one_folder, option
from fairseq_tutel.convert.commands.formats import MAX_SIZE, size_limit
from fairseq_tutel.files import printable
from fairseq_tutel.moe.option_table import EXPERT_DTYPES
from fairseq_tutel.tools.arguments import refuse_output_folder

KEEP = (
    "JSON file with the experts to keep: IDs per MoE layer, global IDs, or a file of naver/nllb-pruning "
    "with global IDs per language [all experts]"
)
KEEP_FOR = (
    "language pairs, separated by commas, whose experts in --keep-experts are kept, such as "
    "eng_Latn-fra_Latn"
)
TOKENIZER = "folder with the tokenizer files to copy [the folder of the checkpoint]"


def _from_hf(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Convert a model in the format of Hugging Face to a folder with a fairseq checkpoint.

    The folder has the checkpoint model.pt, its dictionary and its BPE files. Weights keep their bits and
    their dtype. No pickled code runs. docs/released.md lists the models.
    """
    from fairseq_tutel.convert.released import from_hf
    from fairseq_tutel.convert.released.folder import ReleasedFolder

    refuse_output_folder(output, inputs[0], from_hf.CHECKPOINT, arguments.overwrite)
    how = from_hf.Experts(
        expert_dtype=arguments.expert_dtype or "",
        keep=arguments.keep_experts,
        pairs=arguments.keep_for.split(",") if arguments.keep_for is not None else (),
    )
    with ReleasedFolder(inputs[0]) as folder:
        saved, notes = from_hf.convert(folder, output, how)
    for note in notes:
        print(printable(f"note: {note}"))
    return f"/{from_hf.CHECKPOINT}: {saved.name('model')}, task {saved.name('task')}{NEW_RUN}"


def _to_hf(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
    """Convert a fairseq checkpoint to a folder in the format of Hugging Face.

    The model must have the form of a released model, which docs/released.md lists. If it has not, the tool
    prints the option or tensor that differs. Tokenizer files next to the checkpoint are copied.
    """
    from fairseq_tutel.checkpoint.saved import SavedModel
    from fairseq_tutel.convert.released import to_hf
    from fairseq_tutel.convert.released.folder import CONFIG

    refuse_output_folder(output, inputs[0], CONFIG, arguments.overwrite)
    limit = size_limit(arguments)
    saved = SavedModel.open(inputs[0], keep_shards=True)
    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else inputs[0].parent
    if not tokenizer.is_dir():
        raise ValueError(f"--tokenizer is {tokenizer}, which is not a folder; give an existing folder.")
    return f": {to_hf.convert(saved, output, limit, tokenizer)}"


KINDS = (
    Conversion(
        name="from-hf",
        convert=_from_hf,
        example="nllb-200-distilled-600M --output nllb",
        source="the folder with config.json, weights and tokenizer files",
        inputs=one_folder,
        output="the folder to write",
        is_folder=True,
        options=(
            option(
                "--expert-dtype",
                "dtype of a MoE model's experts; int8 and int4 quantize the matrices [keep their dtype]",
                choices=("fp32", *EXPERT_DTYPES),
            ),
            option("--keep-experts", KEEP, "FILE", type=Path),
            option("--keep-for", KEEP_FOR, "PAIRS"),
        ),
    ),
    Conversion(
        name="to-hf",
        convert=_to_hf,
        example="SAVE/checkpoint_best.pt --output exported",
        output="the folder to write",
        is_folder=True,
        options=(
            option("--tokenizer", TOKENIZER, "FOLDER"),
            option("--max-shard-size", MAX_SIZE, "BYTES", default="5GB"),
        ),
    ),
)
