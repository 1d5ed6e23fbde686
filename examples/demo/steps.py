"""The demo's steps. Each step is one fairseq command, and writes only to `demo/`."""

import re
from collections.abc import Iterable
from pathlib import Path

import tools
from recipes import TOKENS_PER_SAMPLE, Recipe, training_flags
from tools import run

OUT = Path("demo")
CORPUS = OUT / "corpus"
DATA = str(OUT / "bin")

PROMPTS = [
    "def __init__(self,",
    "Return the number of",
    "if not isinstance(",
    "for name in",
    "raise ValueError(",
    "This module provides",
]

TRAINING_PROGRESS = (
    r'train_inner .*?"(ppl)": "(.+?)".*?"(wps)": "(.+?)".*?"(num_updates)": "(.+?)"'
    r'|"(valid_ppl)": "(.+?)"'
)


def preprocess(splits: Iterable[str]) -> None:
    """Binarize the splits of the corpus."""
    prefixes = [f"--{split}pref={CORPUS / split}.bpe" for split in splits]
    # fairseq starts the last chunk after all other chunks, so there are more chunks (workers) than cores.
    arguments = ["--only-source", *prefixes, "--destdir", DATA, "--workers", "8"]
    run("fairseq-preprocess", arguments, OUT / "preprocess.log", show=r"\[None\] (.*)")


def train(recipe: Recipe) -> float:
    """Train a model, and return the training speed in tokens per second."""
    return tools.train(recipe.name, [*_model(recipe), *training_flags(recipe)], OUT, TRAINING_PROGRESS)


def evaluate(recipe: Recipe) -> float:
    """Return a trained model's perplexity per token on the test split."""
    arguments = [*_model(recipe), "--path", _checkpoint(recipe), "--gen-subset", "test"]
    arguments += ["--tokens-per-sample", str(TOKENS_PER_SAMPLE), "--max-tokens", "2048"]
    log = OUT / f"eval-{recipe.name}.log"
    shown = r"(Evaluated .* tokens in .*|Loss \(base 2\): .*)"
    output = run("fairseq-eval-lm", [*arguments, "--no-progress-bar"], log, shown)
    return float(re.findall(r"Perplexity: ([\d.]+)", output)[-1])


def generate(recipe: Recipe) -> None:
    """Generate continuations of some lines of code and text."""
    prompts = OUT / "prompts.txt"
    prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    arguments = [*_model(recipe), "--path", _checkpoint(recipe), "--input", str(prompts)]
    arguments += ["--bpe", "sentencepiece", "--sentencepiece-model", str(CORPUS / "bpe.model")]
    arguments += ["--beam", "4", "--max-len-b", "30"]
    run("fairseq-interactive", arguments, OUT / "generate.log", show=r"^D-\d+\t\S+\t(.*)")


def _model(recipe: Recipe) -> list[str]:
    return [DATA, "--user-dir", "user_dir", "--task", recipe.task, "--cpu"]


def _checkpoint(recipe: Recipe) -> str:
    return str(OUT / recipe.name / "checkpoint_last.pt")
