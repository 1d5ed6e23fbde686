"""Names of stock fairseq that have a twin here: architectures, tasks, optimizers."""

from typing import Any

from fairseq_tutel.tools.convert.options import name_of, rename

ENCODER_DECODERS = (
    "transformer",
    "transformer_tiny",
    "transformer_iwslt_de_en",
    "transformer_wmt_en_de",
    "transformer_vaswani_wmt_en_de_big",
    "transformer_vaswani_wmt_en_fr_big",
    "transformer_wmt_en_de_big",
    "transformer_wmt_en_de_big_t2t",
)
TASKS = {
    "language_modeling": "moe_language_modeling",
    # Meta's own, which read the same kind of model; stock fairseq has them not, or not alike.
    "streaming_language_modeling": "moe_language_modeling",
    "multilingual_language_modeling": "moe_language_modeling",
    "translation": "moe_translation",
}
OPTIMIZERS = {
    "adam": "FairseqAdam",
    "sgd": "SGD",
    "nag": "FairseqNAG",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adamax": "FairseqAdamax",
}


def is_language_model(arch: str) -> bool:
    """Return whether an architecture, stock or ours, has a decoder alone."""
    return arch.removeprefix("moe_").startswith("transformer_lm")


def rename_to_ours(state: dict[str, Any], option: str) -> None:
    """Give the architecture and task of a checkpoint our names.

    Args:
        state: the checkpoint.
        option: of the command line that names it.

    Raises:
        ValueError: the architecture has no twin that these tools know.
    """
    arch, task = name_of(state, "model"), name_of(state, "task")
    if not is_language_model(arch) and arch not in ENCODER_DECODERS:
        raise ValueError(
            f"{option} has the architecture {arch or 'without a name'}, which has no twin here; there are "
            f"transformer_lm…, {', '.join(ENCODER_DECODERS)}."
        )
    rename(state, "model", f"moe_{arch}")
    rename(state, "task", TASKS.get(task, task))


def rename_to_stock(state: dict[str, Any]) -> None:
    """Give the architecture and task of a checkpoint of ours the names of stock fairseq.

    Raises:
        ValueError: Meta's branch of it has no such architecture.
    """
    arch, task = name_of(state, "model").removeprefix("moe_"), name_of(state, "task")
    if not is_language_model(arch) and arch not in ENCODER_DECODERS:
        raise ValueError(
            f"--input has the architecture {arch or 'without a name'}, and Meta's branch has experts in "
            "transformer_lm… and transformer… alone; give a checkpoint of such a model."
        )
    rename(state, "model", arch)
    stock = {ours: theirs for theirs, ours in reversed(TASKS.items())}
    rename(state, "task", stock.get(task, task))
