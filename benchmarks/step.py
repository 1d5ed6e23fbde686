"""`python -m benchmarks.step`: time a training step of fairseq's Trainer, with optimizer and clipping.

The MoE model is compared with a dense model of equal active FLOPs, and with the einsum formulation. All
variants except dense_stock_adam use torch's fused Adam, which is faster than fairseq's.
"""

import argparse
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from fairseq.logging import metrics
from torch import Tensor, nn

from benchmarks import command, timing
from benchmarks.einsum_model import EinsumFeedForward
from benchmarks.fairseq_models import SHAPES, Built, Shape, build, replaced, samples_of, words_of
from benchmarks.layer_check import TOLERANCES, relative_errors
from benchmarks.machine import device_of, facts
from benchmarks.output import BadOption, Report, Row
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

BASE = "dense"
VARIANTS = (BASE, "dense_stock_adam", "moe", "moe_einsum")
ROUNDS, QUICK_ROUNDS = 7, 2


def main(words: list[str] | None = None) -> int:
    """Measure; return 1 if the outputs of the two models with experts differ, else 0."""
    parser = command.parser_of("step", "Time a training step of a model with experts.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where, in float32")
    add("--arch", choices=SHAPES, default="moe_transformer_lm_gpt", help="sizes are ours")
    add("--top-k", type=int, nargs="+", help="a configuration for each; 1, of the recipe 2")
    add("--threads", type=command.positive, default=1, help="on CPU")
    add("--rounds", type=command.positive, default=ROUNDS, help="timed steps of each")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    shape = SHAPES[options.arch]
    shape = shape.tiny() if options.quick else shape
    options.top_k = options.top_k or [shape.top_k]
    for top_k in options.top_k:
        if not 1 <= top_k <= shape.experts:
            raise BadOption(f"--top-k is {top_k}; give 1 to {shape.experts}, the number of experts.")
    torch.set_num_threads(options.threads)
    machine = facts(device, torch.float32)
    report = Report("step", BASE, machine, command.shown(options), options.json)
    for top_k in options.top_k:
        measured(replace(shape, top_k=top_k), options, device, report)
    report.finish()
    return int(any(row["status"] not in ("ok", "skipped") for row in report.rows))


def measured(shape: Shape, options: argparse.Namespace, device: torch.device, report: Report) -> None:
    """Check and time all variants of a shape."""
    samples = samples_of(shape)
    rows: dict[str, Row] = {name: {"variant": name, "status": "ok"} for name in VARIANTS}
    built = {name: _built(name, shape, device) for name in VARIANTS}
    rows["moe_einsum"] |= _compared(built["moe"].model, built["moe_einsum"].model, shape)
    steps = {name: step_of(each, samples) for name, each in built.items() if rows[name]["status"] == "ok"}
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    took = timing.interleaved(steps, rounds, device)
    tokens = shape.update_freq * shape.sentences * shape.tokens
    for name, summary in timing.against(took, BASE).items():
        rate = tokens / summary["seconds"]
        rows[name] |= {**summary, "rate": rate, "rate_unit": "tokens/s"}
    about = {**asdict(shape), "dense_ffn_dim": shape.dense_ffn_dim}
    report.add(f"{options.arch} k{shape.top_k}", about, rows.values())


def _built(name: str, shape: Shape, device: torch.device) -> Built:
    """Return a variant's model."""
    optimizer = "adam" if name == "dense_stock_adam" else "moe_adam"
    moe = name.startswith("moe")
    # The einsum variant has no balance loss and no metrics, which makes it faster.
    words = words_of(shape, moe=moe, balanced=name == "moe", optimizer=optimizer)
    built = build(shape, words, device)
    if name == "moe_einsum":
        replaced(built.model, MoEFeedForward, EinsumFeedForward)
    return built


def step_of(built: Built, samples: list[dict[str, Any]]) -> timing.Step:
    """Return a function that runs an update of fairseq's Trainer."""
    trainer = built.trainer()

    def step() -> None:
        with metrics.aggregate("train"), metrics.aggregate("train_inner"):
            trainer.train_step(samples)

    return step


@torch.no_grad()
def _compared(ours: nn.Module, einsum: nn.Module, shape: Shape) -> Row:
    """Compare the outputs of both models with experts for a few tokens, without dropping."""
    few = replace(shape, sentences=2, tokens=8)
    (sample, *_) = samples_of(few)
    layers = [layer for layer in einsum.modules() if isinstance(layer, EinsumFeedForward)]
    for layer in layers:
        layer.capacity = few.sentences * few.tokens
    outputs: list[Tensor] = [each.eval()(**sample["net_input"])[0] for each in (ours, einsum)]
    for layer in layers:
        layer.capacity = None
    (error,) = relative_errors({"y": outputs[1]}, {"y": outputs[0]}).values()
    if error <= TOLERANCES[torch.float32]:
        return {"error": error}
    return {"status": "wrong", "reason": f"its output differs from moe's by {error:.1e}"}


if __name__ == "__main__":
    sys.exit(main())
