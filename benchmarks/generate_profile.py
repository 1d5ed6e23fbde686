"""`python -m benchmarks.generate_profile`: where the time of fairseq's beam search goes with a MoE model.

fairseq's SequenceGenerator translates random sentences to a fixed number of random tokens, with the
translation model of `benchmarks.step`. A part's time excludes the parts inside of it:

- products: the linear maps of the experts
- layer: the rest of the MoE layers: gate, choice, gathers, activations, sums
- model: all other modules: attention, embeddings, dense FFNs, output projection
- search: the generator: beam search, reordering of the cache, bookkeeping

`ratio` is the time of a round divided by that of the dense model with equal active FLOPs.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator

from benchmarks import command, timing
from benchmarks.bad_option import BadOption
from benchmarks.fairseq_models import SHAPES, SPECIAL, Built, Shape, build, samples_of, words_of
from benchmarks.machine import device_of, facts
from benchmarks.output import Report, Row
from fairseq_tutel.kernels import few_rows, ffn_by_expert
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

BASE, MOE = "dense", "moe"
PARTS = ("products", "layer", "model", "search")
ROUNDS, QUICK_ROUNDS = 5, 2
TOKENS, QUICK_TOKENS = 20, 3


class Parts:
    """The seconds of each part, without those of the parts inside of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, counted as this part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                self.seconds[part] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return run


@contextmanager
def watched(parts: Parts) -> Iterator[None]:
    """Count the parts of the generators that run inside the block."""
    places = (
        (SequenceGenerator, "_generate", "search"),
        (EnsembleModel, "forward_encoder", "model"),
        (EnsembleModel, "forward_decoder", "model"),
        (MoEFeedForward, "forward", "layer"),
        (few_rows, "linear_of_few", "products"),
        (ffn_by_expert, "linear", "products"),
    )
    with ExitStack() as stack:
        for owner, name, part in places:
            stack.enter_context(patch.object(owner, name, parts.timed(part, getattr(owner, name))))
        yield


def main(words: list[str] | None = None) -> int:
    """Measure; return 0."""
    parser = command.parser_of("generate_profile", "Profile fairseq's beam search with a MoE model.")
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 32, 128], help="sentences at a time")
    add("--beams", type=int, nargs="+", default=[1, 5], help="hypotheses of a sentence")
    add("--threads", type=int, default=1, help="threads of torch")
    add("--rounds", type=int, default=ROUNDS, help="measured rounds")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    for flag in ("batches", "beams", "threads", "rounds"):
        given = getattr(options, flag)
        least = min(given) if isinstance(given, list) else given
        if least < 1:
            raise BadOption(f"--{flag} is {least}; give at least 1.")
    device = device_of("cpu")
    torch.set_num_threads(options.threads)
    shape = SHAPES["moe_transformer"]
    shape = replace(shape.tiny() if options.quick else shape, tokens=TOKENS)
    tokens = QUICK_TOKENS if options.quick else TOKENS
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    built = {name: build(shape, words_of(shape, moe=name == MOE), device) for name in (BASE, MOE)}
    report = Report(
        "generate_profile", BASE, facts(device, torch.float32), command.shown(options), options.json
    )
    for batch in options.batches:
        for beam in options.beams:
            rows = measured(built, replace(shape, sentences=batch), beam, tokens, rounds)
            report.add(f"batch {batch}, beam {beam}", {**asdict(shape), "sentences": batch}, rows)
    report.finish(options.plot)
    return 0


def measured(built: dict[str, Built], shape: Shape, beam: int, tokens: int, rounds: int) -> list[Row]:
    """Time both models, and the parts of the MoE model."""
    (sample, *_) = samples_of(shape)
    generators = {name: _generator(each, shape, beam, tokens) for name, each in built.items()}
    steps = {name: lambda each=each: each.generate([], sample) for name, each in generators.items()}
    rows: dict[str, Row] = {name: {"variant": name, "status": "ok"} for name in steps}
    took = timing.interleaved(steps, rounds, torch.device("cpu"))
    for name, summary in timing.against(took, BASE).items():
        rows[name] |= {**summary, "rate": shape.sentences * tokens / summary["seconds"]}
        rows[name]["rate_unit"] = "tokens/s"
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(rounds):
        parts = Parts()
        with watched(parts):
            steps[MOE]()
        total = sum(parts.seconds.values())
        for part in PARTS:
            shares[part].append(parts.seconds[part] / total)
    found = {part: median(each) for part, each in shares.items()}
    note = ", ".join(f"{part} {100 * share:.1f} %" for part, share in found.items())
    rows[MOE] |= {"shares": found, "note": note}
    return list(rows.values())


def _generator(built: Built, shape: Shape, beam: int, tokens: int) -> SequenceGenerator:
    """Return fairseq's generator for hypotheses of exactly `tokens` tokens."""
    symbols = Dictionary()
    for number in range(shape.words - SPECIAL):
        symbols.add_symbol(f"w{number}")
    return SequenceGenerator(
        [built.model.eval()], symbols, beam_size=beam, max_len_b=tokens, min_len=tokens
    )


if __name__ == "__main__":
    sys.exit(main())
