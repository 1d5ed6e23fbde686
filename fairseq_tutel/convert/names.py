"""Names of architectures, tasks and optimizers: fairseq's, and those of their MoE variants."""

from fairseq_tutel.checkpoint.saved import SavedModel

SWIN = "swin_v2"  # its MoE variant has moe as a suffix
# Architectures, tasks and optimizers of fairseq with MoE variants that converters support.
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
    # Meta's tasks, which train the same kind of model.
    "streaming_language_modeling": "moe_language_modeling",
    "multilingual_language_modeling": "moe_language_modeling",
    "translation": "moe_translation",
}
# Classes of fairseq's optimizers by name.
OPTIMIZERS = {
    "adam": "FairseqAdam",
    "sgd": "SGD",
    "nag": "FairseqNAG",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adamax": "FairseqAdamax",
}


def with_experts(name: str) -> str:
    """Return the name of the MoE variant of an architecture, task, criterion or optimizer."""
    return name.replace(SWIN, f"{SWIN}_moe", 1) if name.startswith(SWIN) else f"moe_{name}"


def without_experts(name: str) -> str:
    """Return the name of the dense variant."""
    return name.removeprefix("moe_").replace(f"{SWIN}_moe", SWIN)


def is_language_model(arch: str) -> bool:
    """Return whether an architecture has only a decoder."""
    return arch.removeprefix("moe_").startswith("transformer_lm")


def use_moe_names(saved: SavedModel) -> None:
    """Rename the architecture and the task of a checkpoint to their MoE variants.

    Raises:
        ValueError: the architecture has no MoE variant that converters support.
    """
    arch, task = saved.name("model"), saved.name("task")
    if not is_language_model(arch) and arch not in ENCODER_DECODERS:
        raise ValueError(
            f"{saved.flag} has the architecture {arch or 'without a name'}, which has no MoE variant; "
            f"supported are transformer_lm…, {', '.join(ENCODER_DECODERS)}."
        )
    saved.rename("model", f"moe_{arch}")
    saved.rename("task", TASKS.get(task, task))
