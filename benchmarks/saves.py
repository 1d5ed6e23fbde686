"""`python -m benchmarks.saves`: how long a training stands still at a full, sharded and background save.

One training of a language model, started by torchrun, saves in all three forms in turn, --rounds times. The
ranks share the experts. `seconds` is the time in which fairseq's loop is not computing an update, from the
begin of a save to its commit; `ratio` is to a full save of the same round. `peak` is the growth of a rank's
own memory in this time, `formula` that of docs/checkpoints.md.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary, indexed_dataset

from benchmarks import command, timing
from benchmarks.bad_option import BadOption
from benchmarks.machine import facts
from benchmarks.output import Report, Row
from benchmarks.saves_run import FOLDER, FORMS, ROUNDS

WORDS, TOKENS, SENTENCES = 1000, 64, 2000
MOMENTS = 2  # of Adam
BYTES = 4  # float32


def main(words: list[str] | None = None) -> int:
    """Train and print the measurements."""
    parser = command.parser_of("saves", "Time in which one training stands still at saves of each form.")
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes, which share the experts")
    add("--layers", type=int, default=4, help="MoE layers")
    add("--experts", type=int, default=16, help="experts of a layer")
    add("--model-dim", type=int, default=512, help="D")
    add("--hidden-dim", type=int, default=2048, help="H of an expert")
    add("--rounds", type=int, default=3, help="saves of each form")
    add("--folder", type=Path, help="where to save; the system's own folder if it is not given")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    if options.experts % options.ranks:
        raise BadOption(
            f"--experts is {options.experts}, which --ranks {options.ranks} does not divide; give a "
            "multiple."
        )
    if options.quick:
        options.layers, options.experts, options.rounds = 1, 2 * options.ranks, 1
        options.model_dim, options.hidden_dim = 16, 32
    shown = {key: value for key, value in command.shown(options).items() if key != "folder"}
    report = Report("saves", FORMS[0], facts(torch.device("cpu"), torch.float32), shown, options.json)
    folder = Path(tempfile.mkdtemp(prefix="saves-", dir=options.folder))
    try:
        _train(options, folder)
        found = [_read(folder / f"saves-{rank}.jsonl") for rank in range(options.ranks)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = _experts_bytes(options) / 2**20
    name = f"{size:.0f} MiB of experts with {MOMENTS} moments each, {options.ranks} ranks"
    report.add(name, {"experts_bytes": _experts_bytes(options)}, _rows(options, found))
    report.finish(options.plot)
    return 0


def _experts_bytes(options: argparse.Namespace) -> int:
    """Return the bytes of all experts, without moments."""
    D, H = options.model_dim, options.hidden_dim
    return options.layers * options.experts * (2 * D * H + D + H) * BYTES


def _train(options: argparse.Namespace, folder: Path) -> None:
    """Run the training."""
    data = folder / "data"
    data.mkdir()
    _write_data(data)
    words = [
        data, "--task", "moe_language_modeling", "--arch", "moe_transformer_lm",
        "--criterion", "moe_cross_entropy", "--optimizer", "moe_adam", "--lr", 0.001,
        "--decoder-layers", options.layers, "--decoder-attention-heads", 8 if options.model_dim > 64 else 2,
        "--decoder-embed-dim", options.model_dim, "--decoder-input-dim", options.model_dim,
        "--decoder-output-dim", options.model_dim, "--decoder-ffn-embed-dim", options.hidden_dim,
        "--moe-freq", 1, "--moe-expert-count", options.experts, "--tokens-per-sample", TOKENS,
        "--batch-size", 2, "--max-update", 100_000, "--save-dir", folder / "checkpoints",
        "--no-epoch-checkpoints", "--save-interval-updates", 1, "--keep-interval-updates", 1,
        "--disable-validation",
        "--moe-checkpoint", "sharded", "--moe-save-async", "--log-format", "json", "--log-interval", 1000,
    ]  # fmt: skip
    launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", options.ranks)
    command_line = [sys.executable, "-m", *launcher, "-m", "benchmarks.saves_run", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", FOLDER: str(folder), ROUNDS: str(options.rounds)}
    subprocess.run(list(map(str, command_line)), env=environment, check=True, stdout=subprocess.DEVNULL)


def _write_data(folder: Path) -> None:
    """Write random text as fairseq's preprocessing does."""
    dictionary = Dictionary()
    for i in range(WORDS):
        dictionary.add_symbol(f"w{i}")
    dictionary.save(str(folder / "dict.txt"))
    generator = torch.Generator().manual_seed(1)
    path = str(folder / "train")
    builder = indexed_dataset.make_builder(f"{path}.bin", impl="mmap", vocab_size=len(dictionary))
    for _ in range(SENTENCES):
        ids = torch.randint(dictionary.nspecial, len(dictionary), (TOKENS,), generator=generator)
        builder.add_item(ids.int())
    builder.finalize(f"{path}.idx")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _rows(options: argparse.Namespace, found: list[list[dict[str, Any]]]) -> Iterator[Row]:
    """Yield a row for rank 0 and one for the other ranks, of each form."""
    took = defaultdict(list)
    for saves in zip(*found, strict=True):  # the slowest rank decides when training continues
        took[saves[0]["form"]].append(max(save["seconds"] for save in saves))
    summaries = timing.against(took, FORMS[0])
    for form in FORMS:
        for name, ranks in (("rank 0", found[:1]), ("other ranks", found[1:])):
            peaks = [save["peak_bytes"] for saves in ranks for save in saves if save["form"] == form]
            if not peaks:
                continue
            yield {
                "variant": f"{form}, {name}",
                "status": "ok",
                **summaries[form],
                "formula_bytes": formula(options, form, is_first=name == "rank 0"),
                "peak_bytes": max(peaks),
                "note": _slower(found[0], form) if name == "rank 0" else "",
            }


def _slower(saves: list[dict[str, Any]], form: str) -> str:
    """Return how much longer updates take while threads write."""
    alone = [seconds for save in saves for seconds in save["updates"]["false"]]
    writing = [seconds for save in saves if save["form"] == form for seconds in save["updates"]["true"]]
    if not writing:
        return ""
    ratio = statistics.median(writing) / statistics.median(alone)
    return f"{len(writing)} updates while threads write take {ratio:.1f} times as long"


def formula(options: argparse.Namespace, form: str, is_first: bool) -> int:
    """Return the bytes that a rank needs in addition at a save; see docs/checkpoints.md.

    full: with several ranks, rank 0 has a copy of all experts and moments, and one stacked tensor arrives.
    background: copies of the rank's own experts and moments. Other parameters are not counted.
    """
    everything = _experts_bytes(options) * (1 + MOMENTS)
    if form == "full":
        stack = options.experts * options.model_dim * options.hidden_dim * BYTES
        return everything + stack if is_first and options.ranks > 1 else 0
    return everything // options.ranks if form == "background" else 0


if __name__ == "__main__":
    sys.exit(main())
