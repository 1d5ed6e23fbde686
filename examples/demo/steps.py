"""The demo's steps, each one command of fairseq's; all that they write is in `demo/`."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

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

# The first updates allocate memory and warm up; they say nothing about speed.
UNTIMED_UPDATES = 10


def preprocess(splits: Iterable[str]) -> None:
    """Binarise the splits of the corpus."""
    prefixes = [f"--{split}pref={CORPUS / split}.bpe" for split in splits]
    # fairseq leaves the last of the chunks until the others are done, so more of them than cores.
    arguments = ["--only-source", *prefixes, "--destdir", DATA, "--workers", "8"]
    run("fairseq-preprocess", arguments, OUT / "preprocess.log", show=r"\[None\] (.*)")


def train(recipe: Recipe) -> float:
    """Train a model; return its speed in tokens per second."""
    arguments = [*_model(recipe), *training_flags(recipe), "--save-dir", str(OUT / recipe.name)]
    arguments += ["--log-file", str(_statistics(recipe))]
    run("fairseq-train", arguments, OUT / f"train-{recipe.name}.log", show=TRAINING_PROGRESS)
    return _tokens_per_second(_statistics(recipe))


def evaluate(recipe: Recipe) -> float:
    """Return a trained model's perplexity per token of the test split."""
    arguments = [*_model(recipe), "--path", _checkpoint(recipe), "--gen-subset", "test"]
    arguments += ["--tokens-per-sample", str(TOKENS_PER_SAMPLE), "--max-tokens", "2048"]
    log = OUT / f"eval-{recipe.name}.log"
    shown = r"(Evaluated .* tokens in .*|Loss \(base 2\): .*)"
    output = run("fairseq-eval-lm", [*arguments, "--no-progress-bar"], log, shown)
    return float(re.findall(r"Perplexity: ([\d.]+)", output)[-1])


def generate(recipe: Recipe) -> None:
    """Let a trained model continue some lines of code and text."""
    prompts = OUT / "prompts.txt"
    prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    arguments = [*_model(recipe), "--path", _checkpoint(recipe), "--input", str(prompts)]
    arguments += ["--bpe", "sentencepiece", "--sentencepiece-model", str(CORPUS / "bpe.model")]
    arguments += ["--beam", "4", "--max-len-b", "30"]
    run("fairseq-interactive", arguments, OUT / "generate.log", show=r"^D-\d+\t\S+\t(.*)")


def report(recipes: Sequence[Recipe]) -> Path:
    """Draw the trainings, over one another, on one page; return its place."""
    page = OUT / "report.html"
    arguments = ["-m", "fairseq_tutel", "report", "--output", str(page)]
    arguments += [f"--name={recipe.name}" for recipe in recipes]
    arguments += [str(_statistics(recipe)) for recipe in recipes]
    run("python", arguments, OUT / "report.log", show=r"(.+)")
    return page


def _model(recipe: Recipe) -> list[str]:
    return [DATA, "--user-dir", "user_dir", "--task", recipe.task, "--cpu"]


def _statistics(recipe: Recipe) -> Path:
    return OUT / f"train-{recipe.name}.json"


def _checkpoint(recipe: Recipe) -> str:
    return str(OUT / recipe.name / "checkpoint_last.pt")


def _tokens_per_second(statistics: Path) -> float:
    """The median over the entries of a training log; each times the updates since the last one.

    A median, since other work on the machine spoils some entries and must not spoil the result.
    """
    with open(statistics, encoding="utf-8") as lines:
        entries = [json.loads(line) for line in lines if line.startswith('{"epoch"')]
    return median(
        float(entry["wps"])
        for entry in entries
        if "wps" in entry and int(entry["num_updates"]) > UNTIMED_UPDATES
    )
