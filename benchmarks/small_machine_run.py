"""Opens a model with its experts on disk, translates, and prints a line of JSON for each phase.

The phases are `opened`, `cold` (no expert is in the caches) and `warm` (the same sentences again).
`benchmarks.small_machine` runs this file in a process of its own.
"""

import argparse
import json
import logging
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fairseq_tutel as ft
from benchmarks.small_machine_model import LANGUAGES
from fairseq_tutel.plugin.feed_forward import MoEFeedForward
from fairseq_tutel.plugin.opening.offload import STORES


@dataclass
class Found:
    """The measurements of a phase.

    Attributes:
        parts: the seconds of each part.
        cpu_parts: their seconds of CPU time.
        steps: the number of decoding steps.
        encoder_experts: the number of experts that layers of the encoder used, summed over their calls.
    """

    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu_parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    encoder_experts: float = 0


def main() -> None:
    """Run all phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--beam", type=int, required=True)
    parser.add_argument("--sentences", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--compute", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--words", type=int, required=True)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    use_cores(sorted(os.sched_getaffinity(0))[: options.threads])
    begin, cpu = time.perf_counter(), time.process_time()
    model = ft.from_checkpoint(
        options.folder,
        data=options.folder,
        device="cpu",
        dtype={"bf16": torch.bfloat16, "int8": torch.int8}[options.dtype],
        moe_expert_store="on-demand",
        moe_expert_cache=options.cache,
        moe_expert_compute=options.compute,
    )
    facts = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({"phase": "opened", **facts}), flush=True)
    draws = random.Random(1)
    texts = [
        " ".join(f"w{draws.randrange(options.words)}" for _ in range(options.tokens))
        for _ in range(options.sentences)
    ]
    for file in (options.folder / "experts").rglob("*.safetensors"):
        drop(file)
    for phase in ("cold", "warm"):
        print(
            json.dumps({**translate(model, texts, options.beam, options.tokens), "phase": phase}),
            flush=True,
        )


def translate(model: Any, texts: list[str], beam: int, tokens: int) -> dict[str, Any]:
    """Translate texts to random translations of `tokens` tokens; return the measurements."""
    torch.manual_seed(1)
    with timers(model.models[0]) as found:
        before, begin, cpu = counters(), time.perf_counter(), time.process_time()
        for text in texts:
            model.translate(
                text, beam=beam, sampling=True, max_len_a=0, max_len_b=tokens, min_len=tokens,
                source_lang=LANGUAGES[0], target_lang=LANGUAGES[1],
            )  # fmt: skip
        facts = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    spent = {name: counters()[name] - before[name] for name in ("asked", "fetches", "hits", "bytes")}
    experts = {"decoder_experts": spent["asked"] - found.encoder_experts}
    return {**facts, **spent, **experts, **vars(found)}


def use_cores(cores: list[int]) -> None:
    """Run all threads of this process on the given cores, with a thread of torch on each."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(len(cores))


def drop(file: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def counters() -> dict[str, float]:
    """Return the counters of the expert store."""
    (store,) = STORES.values()
    return vars(store.counters).copy()


@contextmanager
def timers(model: nn.Module) -> Iterator[Found]:
    """Measure the encoder and the parts of the decoder in the block."""
    found = Found()
    begun: dict[str, tuple[float, float]] = {}
    hooks = []

    def time_of(part: str, first: nn.Module, last: nn.Module) -> None:
        """Add the time from the begin of `first` to the end of `last`."""

        def begin(*_: Any) -> None:
            begun[part] = time.perf_counter(), time.process_time()

        def end(*_: Any) -> None:
            found.parts[part] += time.perf_counter() - begun[part][0]
            found.cpu_parts[part] += time.process_time() - begun[part][1]

        hooks.append(first.register_forward_pre_hook(begin))
        hooks.append(last.register_forward_hook(end))

    encoder, decoder = model.encoder.layers, model.decoder.layers
    time_of("encoder", encoder[0], encoder[-1])
    for layer in decoder:
        time_of("self-attention", layer.self_attn, layer.self_attn)
        time_of("source attention", layer.encoder_attn, layer.encoder_attn)
        is_moe = isinstance(layer.fc1, MoEFeedForward)
        time_of("experts" if is_moe else "dense FFNs", layer.fc1, layer.fc2)
    time_of("vocabulary", model.decoder.output_projection, model.decoder.output_projection)

    def count_step(*_: Any) -> None:
        found.steps += 1

    def begin_encoder(*_: Any) -> None:
        found.encoder_experts -= counters()["asked"]

    def end_encoder(*_: Any) -> None:
        found.encoder_experts += counters()["asked"]

    hooks.append(encoder[0].register_forward_pre_hook(begin_encoder))
    hooks.append(encoder[-1].register_forward_hook(end_encoder))
    hooks.append(decoder[0].register_forward_pre_hook(count_step))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


if __name__ == "__main__":
    main()
