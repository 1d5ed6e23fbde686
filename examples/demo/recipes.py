"""The two language models of the demo, which differ only in their feed-forward layers.

Every layer of the MoE model has 8 experts in place of the FFN, each half as wide, and a token uses two.
Both models therefore have equal FLOPs per token (except for the gate), but MoE has 4 times the FFN
parameters.
"""

import shlex
from dataclasses import dataclass

TOKENS_PER_SAMPLE = 128
UPDATES = 200
FFN_DIM = 512
TOP_K = 2


@dataclass(frozen=True)
class Recipe:
    """A model of the demo: its name, its fairseq task, and its flags."""

    name: str
    task: str
    flags: str


DENSE = Recipe(
    "dense",
    "language_modeling",
    "--arch transformer_lm --criterion cross_entropy",
)

MOE = Recipe(
    "moe",
    "moe_language_modeling",
    f"""
    --arch moe_transformer_lm --criterion moe_cross_entropy
    --moe-freq 1 --moe-expert-count 8 --moe-top-k {TOP_K} --moe-expert-ffn-dim {FFN_DIM // TOP_K}
    --moe-capacity-factor 0 --moe-gate-loss-wt 0.01
    """,
)

SHARED_FLAGS = f"""
    --decoder-layers 4 --decoder-attention-heads 4 --decoder-ffn-embed-dim {FFN_DIM}
    --decoder-embed-dim 128 --decoder-input-dim 128 --decoder-output-dim 128
    --decoder-normalize-before --share-decoder-input-output-embed --dropout 0 --attention-dropout 0
    --optimizer moe_adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 1
    --lr 0.005 --lr-scheduler polynomial_decay --warmup-updates 30
    --total-num-update {UPDATES} --max-update {UPDATES}
    --tokens-per-sample {TOKENS_PER_SAMPLE} --max-tokens 6144 --seed 1 --num-workers 0
    --no-epoch-checkpoints --log-format json --log-interval 10
"""


def training_flags(recipe: Recipe) -> list[str]:
    """Return the fairseq-train flags of one of the demo's models."""
    return shlex.split(f"{recipe.flags} {SHARED_FLAGS}")
