"""`python -m benchmarks.store`: measure memory and speed of every expert store policy.

A pre-gated language model is written to files on disk. For every policy, a new process opens the model as
fairseq's commands do, and decodes one sentence token by token. The results are tokens/s, and the process's
peak memory (RssAnon) including the opening of the model. Pages of files in the system's page cache do not
count. Each row has the fraction of the files in this cache; for `cold` rows, it is 0 at the start.
"""

import argparse
import contextlib
import ctypes
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from omegaconf import OmegaConf
from torch import Tensor, nn

from benchmarks import command
from benchmarks.fairseq_models import SHAPES, SPECIAL, USER_DIR, Shape, build, words_of
from benchmarks.machine import facts
from benchmarks.memory import own_peak
from benchmarks.output import Report, Row
from benchmarks.timing import spread
from fairseq_tutel import Topology
from fairseq_tutel.checkpoint.experts import save_in_shards
from fairseq_tutel.inference.options import STORE_POLICIES
from fairseq_tutel.plugin.opening.offload import STORES

BASE = "resident"
GOAL = 0.25  # goal: the memory of pregated, as a fraction of resident's
FILE = "checkpoint.pt"
SECONDS = 8.0  # maximum decoding time; prefetch-all is slow because it reads all experts for every token


def main(words: list[str] | None = None) -> int:
    """Measure; return 1 if a policy's logits differ from those of resident, else 0."""
    parser = command.parser_of("store", "Measure the policies of --moe-expert-store.")
    add = parser.add_argument
    add("--folder", type=Path, help="where the model is, or is to be written; else a temporary one")
    add("--layers", type=command.positive, default=12, help="with experts")
    add("--experts", type=command.positive, default=64, help="of a layer")
    add("--ffn-dim", type=command.positive, default=1024, help="of an expert; the model has 512")
    add("--top-k", type=command.positive, default=1, help="experts of a token")
    add("--cache", default="96", help="--moe-expert-cache of the rows that have one")
    add("--tokens", type=command.positive, default=48, help="to decode")
    add("--threads", type=command.positive, default=1, help="of torch's")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    sizes = {"layers": options.layers, "experts": options.experts, "ffn_dim": options.ffn_dim}
    shape = replace(
        SHAPES["moe_transformer_lm_gpt"], **sizes, top_k=options.top_k, freq=1, sentences=1, tokens=1024
    )
    if options.quick:
        shape = replace(shape.tiny(), tokens=64)
        options.tokens, options.cache = 6, "3"
    torch.set_num_threads(options.threads)
    machine = facts(torch.device("cpu"), torch.float32)
    report = Report("store", BASE, machine, {**command.shown(options), "folder": None}, options.json)
    with _folder(options.folder) as folder:
        _in_child(_write, shape, folder)
        _decode_by_every_policy(report, shape, folder, options)
    report.finish()
    return int(any(row["status"] != "ok" for row in report.rows))


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="store-") as made:
        yield Path(made)


def _in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a new process, which imports only what the function needs; return its result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.fairseq_models", "fairseq_tutel.models"])
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def _write(shape: Shape, folder: Path) -> None:
    """Write the model as a sharded checkpoint, unless the folder has one."""
    if (folder / FILE).exists():
        return
    words = [*words_of(shape, moe=True), "--moe-pregate", "1"]
    made = build(shape, words, torch.device("cpu"))
    (folder / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(shape.words - SPECIAL)))
    save_in_shards(made.model, Topology(), lambda parameter: {}, folder)
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(made.cfg, resolve=True, enum_to_str=True),
        "model": made.model.state_dict(),
        "optimizer_history": [
            {"num_updates": 0, "criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
        ],
        "extra_state": {"epoch": 1},
        "last_optimizer_state": None,
    }
    torch.save(state, folder / FILE)


def _decode_by_every_policy(
    report: Report, shape: Shape, folder: Path, options: argparse.Namespace
) -> None:
    files = sorted((folder / "experts").rglob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    about = {**asdict(shape), "expert_bytes": num_bytes}
    rows: list[Row] = []
    expected: Tensor | None = None
    ways = [(BASE, "0", False)]
    ways += [(policy, "0", cold) for policy in STORE_POLICIES for cold in (False, True)]
    ways += [(policy, options.cache, False) for policy in STORE_POLICIES]
    for policy, cache, cold in ways[::4] if options.quick else ways:
        for file in files:
            _drop(file) if cold else file.read_bytes()
        cached = sum(map(_cached, files)) / max(num_bytes, 1)
        row = _in_child(_decode, folder, policy, cache, options.tokens, options.threads)
        name = policy + (f", cache {cache}" if cache != "0" else "") + (", cold" if cold else "")
        logits, counters = row.pop("logits"), row.pop("counters")
        expected = logits if expected is None else expected
        share = row["peak_bytes"] / (rows[0] if rows else row)["peak_bytes"]
        note = (
            f"{share:.1%} of resident's memory, opened in {row['seconds_opening']:.2f} s, "
            f"{cached:.0%} of the files in the page cache"
        )
        if counters:
            note += (
                f"; {counters['fetches']} fetches, {counters['hits']} hits, "
                f"{counters['bytes'] / 2**20:.0f} MiB, {counters['waits']} waits of "
                f"{counters['seconds_waited']:.2f} s, at most {counters['peak_experts']} experts"
            )
        found = {"variant": name, "status": "ok", **row, "share": share, "page_cache": cached}
        if not torch.equal(logits, expected):
            found |= {"status": "wrong", "reason": "its logits are not those of resident"}
        rows.append({**found, "counters": counters, "note": note})
    title = f"{num_bytes / 2**30:.2f} GiB of experts, batch 1"
    report.add(title, about, rows)
    share = next(row["share"] for row in rows if row["variant"].startswith("pregated"))
    print(f"pregated takes {share:.1%} of resident's memory; the goal is at most {GOAL:.0%}")


def _drop(file: Path) -> None:
    """Remove a file from the page cache, unless a process maps the file."""
    descriptor = os.open(file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _cached(file: Path) -> int:
    """Return the number of bytes of a file that are in the page cache."""
    size, page = file.stat().st_size, mmap.PAGESIZE
    present = (ctypes.c_ubyte * -(-size // page))()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(size), present)
        del view
    return min(size, page * sum(flag & 1 for flag in present))


def _decode(folder: Path, policy: str, cache: str, tokens: int, threads: int) -> Row:
    """Open the model and decode, in this process; return time, memory and the last logits."""
    with own_peak() as peak:
        torch.set_num_threads(threads)
        utils.import_user_module(argparse.Namespace(user_dir=str(USER_DIR)))
        begin = time.perf_counter()
        model, counters = _opened(folder, policy, cache)
        opening = time.perf_counter() - begin
        logits, took = _texted(model, tokens)
    steps = took[1:] or took  # the first step starts with an empty expert cache, so it is slower
    return {
        "peak_bytes": peak[0],
        "seconds_opening": opening,
        **spread(steps, "seconds"),
        "rate": len(steps) / sum(steps),
        "rate_unit": "tokens/s",
        "decoded": len(took),
        "logits": logits,
        "counters": asdict(counters) if counters else {},
    }


def _opened(folder: Path, policy: str, cache: str) -> tuple[nn.Module, Any]:
    """Open the model like a fairseq command; return the model and its store's counters, if any."""
    overrides = {"data": str(folder), "moe_expert_store": policy}
    if policy != BASE:
        overrides |= {"moe_expert_cache": cache, "moe_expert_tier": "disk"}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(folder / FILE)], overrides)
    return model.eval(), next((store.counters for store in STORES.values()), None)


@torch.no_grad()
def _texted(model: nn.Module, tokens: int) -> tuple[Tensor, list[float]]:
    """Return the logits of the second token, which all policies compute, and the seconds of each token."""
    state: dict[str, dict[str, Tensor | None]] = {}
    text_BT, took, kept = torch.tensor([[SPECIAL]]), [], None
    begin = last = time.perf_counter()
    while len(took) < tokens and (len(took) < 2 or last - begin < SECONDS):
        logits_V = model(text_BT, incremental_state=state)[0][:, -1]
        # An untrained model repeats one word, so the next word is chosen without the model.
        following = (int(logits_V.argmax()) + 7919 * len(took)) % (logits_V.shape[1] - SPECIAL) + SPECIAL
        text_BT = torch.cat([text_BT, torch.tensor([[following]])], dim=1)
        took.append(time.perf_counter() - last)
        last = time.perf_counter()
        kept = logits_V if len(took) == 2 else kept
    assert kept is not None
    return kept, took


if __name__ == "__main__":
    sys.exit(main())
