"""Train the small translation model of pruning.py and quantized_quality.py, and measure its quality."""

import contextlib
import io
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fairseq_tutel as ft
from fairseq_tutel.__main__ import main as tool

ROOT = Path(__file__).resolve().parents[1]
EXPERTS = 16
# The flags of quickstart.sh, with another number of experts.
FLAGS = f"""
    --task moe_translation --arch moe_transformer_iwslt_de_en --criterion moe_label_smoothed_cross_entropy
    --moe-freq 1 --moe-expert-count {EXPERTS} --moe-top-k 2 --moe-expert-ffn-dim 256
    --max-tokens 2048 --encoder-layers 2 --decoder-layers 2
    --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 --encoder-attention-heads 4
    --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4
    --encoder-normalize-before --decoder-normalize-before --share-all-embeddings --dropout 0.1
    --label-smoothing 0.1 --optimizer moe_adam --adam-betas (0.9,0.98) --clip-norm 1
    --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 60 --total-num-update 300 --max-update 300
    --num-workers 0 --required-batch-size-multiple 1 --no-epoch-checkpoints --disable-validation
    --no-save-optimizer-state --log-format json --log-interval 50
"""


def run(*words: object) -> str:
    """Run a tool of the package in this process and return its output."""
    argv = ["fairseq-tutel", *map(str, words)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(io.StringIO()) as output:
        tool()
    return output.getvalue()


def command(name: str, *words: object) -> list[str]:
    """Return the command line of a command of fairseq."""
    return [str(Path(sys.executable).with_name(f"fairseq-{name}")), *map(str, words)]


def train(data: Path, folder: Path, seed: int) -> Path:
    """Train the model with this seed, unless the folder already has it; return its checkpoint."""
    path = folder / "checkpoint_last.pt"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        words = [
            data,
            "--user-dir",
            ROOT / "user_dir",
            *FLAGS.split(),
            "--seed",
            seed,
            "--save-dir",
            folder,
        ]
        with (folder / "output.txt").open("w") as log:
            subprocess.run(command("train", *words), check=True, stdout=log, stderr=log)
    return path


def perplexity(path: Path, data: Path, **options: Any) -> float:
    """Return a model's perplexity per token of the set valid; `options` are those of `from_checkpoint`."""
    opened = ft.from_checkpoint(path, data, device="cpu", **options)
    opened.task.load_dataset("valid")
    dataset, (model,) = opened.task.dataset("valid"), opened.models
    loss, tokens = 0.0, 0
    order = dataset.ordered_indices().tolist()
    for start in range(0, len(order), 64):
        batch = dataset.collater([dataset[i] for i in order[start : start + 64]])
        with torch.no_grad():
            logits_NTV = model(**batch["net_input"])[0]
        real_NT = batch["target"] != opened.task.target_dictionary.pad()
        log_probs = logits_NTV.float().log_softmax(-1).gather(-1, batch["target"].unsqueeze(-1)).squeeze(-1)
        loss -= float(log_probs[real_NT].sum(dtype=torch.float64))
        tokens += int(real_NT.sum())
    return math.exp(loss / tokens)


def bleu(path: Path, data: Path, *flags: object) -> float:
    """Return the BLEU of a model on the set test, as fairseq-generate with these flags prints it."""
    words = [data, "--user-dir", ROOT / "user_dir", "--path", path, "--beam", 5, "--batch-size", 64]
    words += [
        "--required-batch-size-multiple",
        1,
        "--remove-bpe",
        "sentencepiece",
        "--num-workers",
        0,
        *flags,
    ]
    run = subprocess.run(
        command("generate", *words), check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return float(re.findall(r"BLEU4 = ([\d.]+)", run.stdout)[-1])
