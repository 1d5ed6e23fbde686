"""Names of stock fairseq that have a twin here: architectures, tasks, optimizers."""

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


def has_twin(arch: str) -> bool:
    """Return whether an architecture of stock fairseq has a twin that these tools know."""
    return arch.startswith("transformer_lm") or arch in ENCODER_DECODERS


def is_language_model(arch: str) -> bool:
    """Return whether an architecture, stock or ours, has a decoder alone."""
    return arch.removeprefix("moe_").startswith("transformer_lm")
