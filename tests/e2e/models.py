"""Command-line arguments of the tiny models that the end-to-end tests train.

fairseq drops the last batch of a data set if the batch size is not a multiple of
--required-batch-size-multiple, 8 by default. These arguments set 1, so that no sentence is dropped.
"""

from pathlib import Path

from cli import USER_DIR

SOUND_DIR = str(Path(__file__).parent / "sound_user_dir")
COMMON = (
    "--user-dir", SOUND_DIR, "--log-format", "json", "--log-interval", 1, "--num-workers", 0,
    "--required-batch-size-multiple", 1, "--no-epoch-checkpoints", "--optimizer", "moe_adam",
    "--lr", 0.01, "--clip-norm", 1, "--batch-size", 4,
)  # fmt: skip
EXPERTS = ("--moe-freq", 1, "--moe-expert-count", 4)


def lm_args(data, save_dir, *extra, updates=6):
    """Return arguments for a two-layer language model on 8-token blocks; `extra` overrides others."""
    return [
        data, "--user-dir", USER_DIR, "--task", "moe_language_modeling",
        "--arch", "moe_transformer_lm", "--criterion", "moe_cross_entropy",
        "--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-input-dim", 16,
        "--decoder-output-dim", 16, "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2,
        "--moe-freq", 1, "--moe-expert-count", 4, "--dropout", 0, "--tokens-per-sample", 16,
        "--batch-size", 4, "--optimizer", "moe_adam", "--lr", 0.01, "--clip-norm", 0.5,
        "--max-update", updates, "--log-format", "json", "--log-interval", 1,
        "--save-dir", save_dir, "--no-epoch-checkpoints", "--num-workers", 0,
        "--required-batch-size-multiple", 1, *extra,
    ]  # fmt: skip


def dense_lm_args(data, save_dir, *extra, updates=6):
    """Return `lm_args` without experts: fairseq's task, model, criterion and optimizer."""
    stock = ["--optimizer", "adam", "--task", "language_modeling", "--criterion", "cross_entropy"]
    words = lm_args(data, save_dir, "--arch", "transformer_lm", *stock, *extra, updates=updates)
    for flag in ("--moe-freq", "--moe-expert-count"):
        at = words.index(flag)
        del words[at : at + 2]
    return words


def mt_args(data, save_dir, *extra, updates=6):
    """Return arguments for a translation model of 2 + 2 layers; `extra` overrides other arguments."""
    return [
        data, "--user-dir", USER_DIR, "--task", "moe_translation",
        "--arch", "moe_transformer_iwslt_de_en", "--criterion", "moe_label_smoothed_cross_entropy",
        "--label-smoothing", 0.1, "--encoder-layers", 2, "--decoder-layers", 2,
        "--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 32, "--encoder-attention-heads", 2,
        "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 32, "--decoder-attention-heads", 2,
        "--share-all-embeddings", "--moe-freq", 1, "--moe-expert-count", 4, "--dropout", 0,
        "--max-tokens", 120, "--optimizer", "moe_adam", "--lr", 0.01, "--clip-norm", 0.5,
        "--max-update", updates, "--log-format", "json", "--log-interval", 1,
        "--save-dir", save_dir, "--no-epoch-checkpoints", "--num-workers", 0,
        "--required-batch-size-multiple", 1, *extra,
    ]  # fmt: skip
