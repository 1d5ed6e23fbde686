"""`python -m benchmarks.small_machine --folder DISK`: a 54-billion-parameter translation model on disk.

A model of the form of NLLB-MoE-54B with random weights is written to a folder, and translates with its
experts on disk. Its experts have 27 GB in int4. The pruned form has 36 experts per encoder layer and 12 per
decoder layer (288 of 1,536), which have 10 GB in int8. Other weights are in bf16; with `--dtype int8`, the
linear layers of the decoder are in int8. Each number of cores and beam size runs in a process of its own:

- `peak` is the largest RssAnon so far in the process, read from outside; it includes opening and the cache.
- `cold`: no expert is in the store's cache or in the page cache. `warm`: the same sentences again.
- `rate` is the number of decoding steps per second, without the encoder. A step gives one token of the
  translation; with a beam of 4, it computes four. Translations are random words, so that the tokens choose
  different experts; `experts` is their number per step.
- The note has the rate per second of CPU time. With one core, it is the rate on an idle machine with a fast
  disk; other processes change it little. The note also has the seconds of the encoder for a sentence, and
  the milliseconds of CPU time of each part of a step.
"""

import argparse
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import command
from benchmarks.bad_option import BadOption
from benchmarks.machine import facts
from benchmarks.output import Report, Row
from benchmarks.released import anonymous_bytes
from benchmarks.small_machine_model import SIZES, Shape

GB = 10**9
FORMS = {
    "full": Shape(),
    "pruned": Shape(encoder_experts=36, decoder_experts=12, expert_dtype="int8"),
}
DTYPES = ("bf16", "int8")  # of weights that do not belong to experts
TINY = {
    "model_dim": 64, "hidden_dim": 128, "layers": 2, "freq": 2, "heads": 2, "encoder_experts": 4,
    "decoder_experts": 4, "vocabulary": 100,
}  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Write the models, translate, and print the measurements."""
    parser = command.parser_of("small_machine", "Translate with a 54-billion-parameter model on disk.")
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="where to write the models")
    add("--keep", action="store_true", help="keep the models; a model that is already there is used")
    add("--forms", nargs="+", choices=FORMS, default=[*FORMS], help="which models")
    add("--threads", type=int, nargs="+", default=[1, 2], help="numbers of cores")
    add("--beams", type=int, nargs="+", default=[1, 4], help="beam sizes")
    add("--sentences", type=int, default=2, help="sentences to translate one by one")
    add("--tokens", type=int, default=20, help="tokens of a sentence and of its translation")
    add("--cache", default="4GB", help="--moe-expert-cache")
    add("--compute", default="quantized", help="--moe-expert-compute")
    add("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES], help="--moe-inference-dtype")
    for field in fields(Shape):
        flag, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        add(flag, type=kind, default=argparse.SUPPRESS, help="size of the model, in place of its form's")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    if options.quick:
        options.threads, options.beams, options.sentences, options.tokens = [1], [1], 1, 4
    machine = facts(torch.device("cpu"), torch.bfloat16)
    shown = {key: value for key, value in command.shown(options).items() if key != "folder"}
    report = Report("small_machine", "", machine, shown, options.json)
    for form in options.forms:
        shape = replace(FORMS[form], **((TINY if options.quick else {}) | _given(options)))
        folder = options.folder / f"small-machine-{form}"
        _refuse_other_model(shape, folder)
        try:
            seconds = _write(shape, folder)
            size = sum(file.stat().st_size for file in folder.rglob("*") if not file.is_symlink())
            print(f"{form}: {shape.num_experts} experts, {size / GB:.1f} GB, written in {seconds:.0f} s")
            about = {**asdict(shape), "bytes": size, "experts": shape.num_experts}
            for dtype in options.dtype:
                title = f"{form}, {shape.expert_dtype}, others {dtype}"
                ways = itertools.product(options.threads, options.beams)
                rows = [row for way in ways for row in _rows(folder, shape, dtype, *way, options)]
                report.add(title, {**about, "dtype": dtype}, rows)
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)
    report.finish(None)
    if options.plot is not None:
        plot(report, options.plot)
    return 0


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes of the model that the command line sets."""
    return {field.name: vars(options)[field.name] for field in fields(Shape) if field.name in options}


def _refuse_other_model(shape: Shape, folder: Path) -> None:
    """Raise BadOption if a folder has a model of other sizes."""
    sizes = folder / SIZES
    found = Shape(**json.loads(sizes.read_text())) if sizes.exists() else None
    if (folder / "model.pt").exists() and found != shape:
        raise BadOption(
            f"--folder is {folder.parent}, whose {folder.name} has a model of other sizes; remove it, or "
            "give another folder."
        )


def _write(shape: Shape, folder: Path) -> float:
    """Write a model, unless it is there; return the seconds.

    Raises:
        BadOption: the disk is too full.
    """
    if (folder / "model.pt").exists():
        return 0.0
    folder.mkdir(parents=True, exist_ok=True)
    # The other weights are below 7 GB for all sizes up to those of NLLB-MoE-54B.
    others = 2 * shape.vocabulary * shape.model_dim + 40 * shape.layers * shape.model_dim * shape.hidden_dim
    needed = shape.num_experts * shape.expert_bytes + others
    if (free := shutil.disk_usage(folder).free) < needed:
        raise BadOption(
            f"--folder is {folder.parent}, with {free / GB:.1f} GB free, but the model needs "
            f"{needed / GB:.1f} GB; give another folder."
        )
    words = ["benchmarks.small_machine_model", json.dumps(asdict(shape)), str(folder)]
    begin = os.times().elapsed
    subprocess.run([sys.executable, "-m", *words], check=True)
    return os.times().elapsed - begin


def _rows(
    folder: Path, shape: Shape, dtype: str, threads: int, beam: int, options: argparse.Namespace
) -> Iterator[Row]:
    """Translate in a new process; yield the rows of cold and warm files."""
    command_line = [
        sys.executable, "-m", "benchmarks.small_machine_run", str(folder),
        "--threads", str(threads), "--beam", str(beam),
        "--sentences", str(options.sentences), "--tokens", str(options.tokens),
        "--cache", options.cache, "--compute", options.compute, "--words", str(shape.vocabulary - 8),
        "--dtype", dtype,
    ]  # fmt: skip
    opening = 0.0
    for facts_of, peak in _phases(command_line):
        if facts_of["phase"] == "opened":
            opening = facts_of["seconds"]
            print(
                f"{dtype}: opened in {opening:.1f} s ({facts_of['cpu_seconds']:.1f} s of CPU time), "
                f"peak RssAnon {peak / GB:.2f} GB",
                flush=True,
            )
            continue
        cores = f"{threads} core{'s' if threads > 1 else ''}"
        steps, parts, cpu_parts = (facts_of[key] for key in ("steps", "parts", "cpu_parts"))
        encoder, cpu_encoder = parts.pop("encoder"), cpu_parts.pop("encoder")
        decoding = facts_of["seconds"] - encoder
        cpu = facts_of["cpu_seconds"] - cpu_encoder
        parts["others"] = decoding - sum(parts.values())
        cpu_parts["others"] = cpu - sum(cpu_parts.values())
        used = facts_of["decoder_experts"] / steps
        each = ", ".join(f"{name} {1000 * spent / steps:.0f}" for name, spent in sorted(cpu_parts.items()))
        yield {
            "variant": f"{cores}, beam {beam}, {facts_of['phase']}",
            "status": "ok",
            "seconds": decoding / steps,
            "rate": steps / decoding,
            "rate_unit": "tokens/s",
            "cpu_rate": steps / cpu,
            "read_bytes": facts_of["bytes"],
            "peak_bytes": peak,
            "seconds_opening": opening,
            "encoder_seconds": encoder / options.sentences,
            "total_seconds": facts_of["seconds"],
            "encoder_cpu_seconds": cpu_encoder / options.sentences,
            "parts": {name: spent / steps for name, spent in parts.items()},
            "cpu_parts": {name: spent / steps for name, spent in cpu_parts.items()},
            "experts": used,
            "fetches": facts_of["fetches"],
            "hits": facts_of["hits"],
            "note": f"experts {used:.0f}; CPU {steps / cpu:.2f} tokens/s; "
            f"encoder {encoder / options.sentences:.1f} s; {each}",
        }


def _phases(words: list[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """Run a process; yield its lines of JSON, each with the peak RssAnon of the process until then."""
    peak, done = [0], threading.Event()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:

        def watch() -> None:
            while not done.wait(0.01):
                peak[0] = max(peak[0], anonymous_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"'):
                    yield json.loads(line), peak[0]
        except BaseException:
            process.kill()
            raise
        finally:
            done.set()
            watcher.join()
    if process.returncode:
        sys.exit(f"error: the translation ended with {process.returncode}.")


def plot(report: Report, path: Path) -> None:
    """Draw the time of each part of a decoding step, a bar for each measurement that is not cold."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq's setup prints debug messages
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row["variant"].endswith(", warm")]
    figure = Figure(figsize=(9, 1 + len(rows) / 4), layout="constrained")
    axis = figure.subplots()
    labels = [f"{row['configuration']}: {row['variant'].removesuffix(', warm')}" for row in rows]
    left = [0.0] * len(rows)
    for part in sorted(rows[0]["parts"]):
        widths = [1000 * row["parts"][part] for row in rows]
        axis.barh(labels, widths, left=left, label=part)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.tick_params(labelsize="small")
    axis.set_xlabel("ms per step")
    figure.legend(loc="outside upper center", ncols=6, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
