"""Compare pruning by importance with pruning by load, without training afterwards.

    python examples/pruning.py DATA_BIN [OUT]

DATA_BIN is binarized parallel text, such as OUT/bin of translation.sh. For each seed, a model with the
sizes of quickstart.sh but 16 experts per layer is trained for 300 updates. Loads and importances are
collected on the first 2,000 sentences of train, and perplexity is measured on valid. A share of the experts
of each layer is kept, or ("global") of the whole model. "random" keeps the same random experts in all
layers. BLEU is measured on test, for experts that are kept by load and by importance. Skips models and
results that OUT has. Prints a table at the end.
Environment: SEEDS ("1 2 3"), SHARES ("0.75 0.5 0.25"), OMP_NUM_THREADS (all cores).
"""

import contextlib
import io
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch
from routing_table import mean_of
from tabulate import tabulate

import fairseq_tutel as ft
from fairseq_tutel.__main__ import main as tool

ROOT = Path(__file__).resolve().parents[1]
EXPERTS = 16
# The flags of quickstart.sh, but for the number of experts.
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
WAYS = {
    "load": ("load",),
    "importance": ("importance",),
    "load, global": ("load", "--globally"),
    "importance, global": ("importance", "--globally"),
}
TRANSLATED = ("load", "importance")  # ways whose BLEU is measured


def run(*words: object) -> None:
    """Run a tool of the package in this process, without its output."""
    with (
        mock.patch.object(sys, "argv", ["fairseq-tutel", *map(str, words)]),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        tool()


def command(name: str, *words: object) -> list[str]:
    """Return the command line of a command of fairseq."""
    return [str(Path(sys.executable).with_name(f"fairseq-{name}")), *map(str, words)]


def train(data: Path, folder: Path, seed: int) -> Path:
    """Train the model of a seed, and collect the statistics of its experts; return its checkpoint."""
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
    if not (folder / "use.json").exists():
        outputs = ("--output", folder / "tokens.html", "--output-statistics", folder / "use.json")
        run("tokens", path, data, "--split", "train", "--limit", 2000, *outputs, "--overwrite")
    return path


def perplexity(path: Path, data: Path) -> float:
    """Return a model's perplexity per token of the set valid."""
    opened = ft.from_checkpoint(path, data, device="cpu")
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


def bleu(path: Path, data: Path) -> float:
    """Return the BLEU of a model on the set test, as fairseq-generate prints it."""
    words = [data, "--user-dir", ROOT / "user_dir", "--path", path, "--beam", 5, "--batch-size", 64]
    words += ["--required-batch-size-multiple", 1, "--remove-bpe", "sentencepiece", "--num-workers", 0]
    run = subprocess.run(
        command("generate", *words), check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return float(re.findall(r"BLEU4 = ([\d.]+)", run.stdout)[-1])


def results(data: Path, folder: Path, seed: int, shares: list[float]) -> dict[str, float]:
    """Return the scores of the models of a seed by name, such as "0.5 load"; "1" is the whole model.

    A name is that of a perplexity, or with ", BLEU" that of a BLEU.
    """
    path, file, use = train(data, folder, seed), folder / "results.json", folder / "use.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    rules: dict[str, tuple[object, ...]] = {"1": ()}
    chosen = random.Random(seed)
    for share in shares:
        for way, words in WAYS.items():
            rules[f"{share:g} {way}"] = ("--share", share, "--by", *words, "--statistics", use)
        gone = chosen.sample(range(EXPERTS), EXPERTS - round(share * EXPERTS))
        rules[f"{share:g} random"] = ("--drop", ",".join(map(str, gone)))
    for name, words in rules.items():
        scores = {name: perplexity}
        if name.partition(" ")[2] in ("", *TRANSLATED):
            scores[f"{name}, BLEU"] = bleu
        missing = [score for score in scores if score not in found]
        if not missing:
            continue
        model = folder / "pruned.pt" if words else path
        if words:
            run("convert", "prune", path, *words, "--output", model, "--overwrite")
        for score in missing:
            found[score] = scores[score](model, data)
            file.write_text(json.dumps(found, indent=1))
            print(f"seed {seed}, {score}: {found[score]:.2f}", flush=True)
    return found


def main() -> None:
    """Train, prune and print the table."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/pruning.py DATA_BIN [OUT]")
    data, out = Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "outputs/pruning")
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "1 2 3").split()]
    shares = [float(share) for share in os.environ.get("SHARES", "0.75 0.5 0.25").split()]
    found = [results(data, out / f"seed-{seed}", seed, shares) for seed in seeds]
    ways = (*WAYS, "random", *(f"{way}, BLEU" for way in TRANSLATED))
    whole = {"load": "1", "load, BLEU": "1, BLEU"}  # one column has the scores of the whole model

    def row(share: str, names: list[str]) -> list[str]:
        return [share, *(mean_of([each[name] for each in found], 2) if name else "" for name in names)]

    rows = [row("100 %", [whole.get(way, "") for way in ways])]
    rows += [row(f"{100 * share:g} %", [f"{share:g} {way}" for way in ways]) for share in shares]
    print(tabulate(rows, ["experts kept", *ways], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
