"""`python -m benchmarks.vision`: Swin V2 with experts, a training step and inference, against einsum.

The MoE model is compared with the dense one of equal active FLOPs, and with the einsum formulation of MoE
layers of equal capacity. Training is an update by fairseq's Trainer, inference a forward pass. Every other
block of the last two stages has experts, with one expert per patch and a capacity factor of 1.25, in
training and inference.
"""

import argparse
import sys
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import command, timing
from benchmarks.bad_option import BadOption
from benchmarks.einsum_model import EinsumFeedForward
from benchmarks.fairseq_models import USER_DIR, Built, built_on, replaced
from benchmarks.layer_check import TOLERANCES, relative_errors
from benchmarks.machine import device_of, facts
from benchmarks.output import Report, Row
from benchmarks.step import print_profiles, profiled, step_of
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, moe_layers

BASE, OURS, EINSUM = "dense", "moe", "moe_einsum"
VARIANTS = (BASE, OURS, EINSUM)
ROUNDS, QUICK_ROUNDS = 5, 2
CLASSES = 10


def _training(built: Built, sample: dict[str, Any]) -> timing.Step:
    return step_of(built, [sample])


def _inference(built: Built, sample: dict[str, Any]) -> timing.Step:
    model = built.model

    def step() -> None:
        with torch.no_grad():
            model.eval()(**sample["net_input"])

    return step


MODES = {"inference": _inference, "training": _training}


def main(words: list[str] | None = None) -> int:
    """Measure; return 1 where the two models with experts do not agree, else 0."""
    parser = command.parser_of("vision", "Time Swin V2 with experts, training and inference.")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where, in float32")
    add("--images", type=int, nargs="+", default=[8, 16, 32], help="of a batch; each is a row")
    add("--side", type=int, default=192, help="of an image, in pixels")
    add("--window", type=int, default=12, help="of attention, in patches")
    add("--embed-dim", type=int, default=96, help="of the first stage; every stage doubles it")
    add("--depths", default="1,1,8,2", help="blocks of each stage")
    add("--experts", type=int, default=8, help="of a layer that has some")
    add("--capacity", type=float, default=1.25, help="places, in even shares")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="modes to time")
    add("--threads", type=int, default=1, help="on CPU")
    add("--rounds", type=int, default=ROUNDS, help="timed steps of each")
    add("--profile", action="store_true", help="what takes most of a step, dense and with experts")
    return command.run(parser, words, _measure)


def _measure(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    if options.quick:
        sizes = {"side": 32, "window": 4, "embed_dim": 8, "depths": "2,2", "experts": 4}
        vars(options).update(sizes, images=[2], rounds=QUICK_ROUNDS)
    for flag in ("images", "threads", "rounds", "experts"):
        if np.min(getattr(options, flag)) < 1:
            raise BadOption(f"--{flag} has a number below 1; give at least 1.")
    if options.capacity <= 0:
        raise BadOption(f"--capacity is {options.capacity}; einsum has no other than above 0.")
    torch.set_num_threads(options.threads)
    machine = facts(device, torch.float32)
    report = Report("vision", BASE, machine, command.shown(options), options.json)
    for images in options.images:
        measured(images, options, device, report)
    report.finish(options.plot)
    return int(any(row["status"] != "ok" for row in report.rows))


def measured(images: int, options: argparse.Namespace, device: torch.device, report: Report) -> None:
    """Check, time and, with --profile, profile all variants with one batch size."""
    with TemporaryDirectory() as data:
        _write(data, options.side)
        built = {name: _built(name, data, options, device) for name in VARIANTS}
    sample = _sample(images, options.side)
    compared, layers = _compared(built[OURS].model, built[EINSUM].model, sample)
    rows: list[Row] = []
    about = {"layers": layers, "parameters": {name: _size(built[name].model) for name in VARIANTS}}
    for mode in options.modes:
        of_mode: dict[str, Row] = {
            name: {"mode": mode, "variant": name, "status": "ok"} for name in VARIANTS
        }
        of_mode[EINSUM] |= compared
        steps = {
            name: MODES[mode](built[name], sample) for name, row in of_mode.items() if row["status"] == "ok"
        }
        took = timing.interleaved(steps, options.rounds, device)
        for name, summary in timing.against(took, BASE).items():
            rate = images / summary["seconds"]
            of_mode[name] |= {**summary, "rate": rate, "rate_unit": "images/s"}
        if EINSUM in took:
            of_mode[EINSUM] |= _over_ours(took)
        if options.profile:
            about[f"{mode}_profile"] = {name: profiled(steps[name]) for name in (BASE, OURS)}
        rows += of_mode.values()
    report.add(f"{images} images", about, rows)
    for mode in options.modes:
        print_profiles(about.get(f"{mode}_profile", {}))


def _over_ours(took: dict[str, list[float]]) -> Row:
    """Return how many times as long einsum took as ours in the same round."""
    over = timing.spread([a / b for a, b in zip(took[EINSUM], took[OURS], strict=True)], "over_ours")
    low, middle, high = (over[f"over_ours{end}"] for end in ("_p20", "", "_p80"))
    return {**over, "note": f"{middle:.2f} ({low:.2f}..{high:.2f}) times {OURS}"}


@torch.no_grad()
def _compared(ours: nn.Module, einsum: nn.Module, sample: dict[str, Any]) -> tuple[Row, Row]:
    """Compare the outputs of all MoE layers; return einsum's row, and our routing by layer.

    Outputs of the whole model would be too similar: initial experts have weights near 0.
    """
    outputs: dict[type, list[Tensor]] = {MoEFeedForward: [], EinsumFeedForward: []}
    for model in (ours, einsum):
        for layer in model.modules():
            if (kept := outputs.get(type(layer))) is not None:
                layer.register_forward_hook(lambda _, __, y, kept=kept: kept.append(y))
        model.eval()(**sample["net_input"])
        for layer in model.modules():
            layer._forward_hooks.clear()
    found, wanted = (dict(enumerate(kept)) for kept in reversed(outputs.values()))
    error = max(relative_errors(found, wanted).values())
    layers = {}
    for layer in moe_layers(ours):
        tally = layer.record.tally
        tokens, most = int(tally.num_tokens), int(tally.assigned_KE.sum(0).max())
        layers[layer.label] = {
            "tokens": tokens,
            "busiest_over_mean": most * layer.config.num_experts / (tokens * layer.config.top_k),
            "dropped": int(tally.dropped_K.sum()) / (tokens * layer.config.top_k),
        }
    if error <= TOLERANCES[torch.float32]:
        return {"error": error}, layers
    reason = f"an output of its layers differs from {OURS}'s by {error:.1e}"
    return {"status": "wrong", "reason": reason}, layers


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _write(data: str, side: int) -> None:
    """Write as many black images as there are classes, for the task to know sizes and classes."""
    for split in ("train", "valid"):
        images = np.zeros((CLASSES, side, side, 3), dtype=np.uint8)
        np.savez(f"{data}/{split}.npz", images=images, labels=np.arange(CLASSES))


def _built(name: str, data: str, options: argparse.Namespace, device: torch.device) -> Built:
    """Return a variant's model."""
    words: list[Any] = [
        *("--user-dir", USER_DIR, "--optimizer", "moe_adam", "--lr", 0.0001, "--clip-norm", 1),
        *("--swin-window", options.window, "--swin-embed-dim", options.embed_dim),
        *("--swin-depths", options.depths, "--swin-heads", _heads(options)),
        *("--swin-form", "moe", "--swin-drop-path", 0, "--log-format", "simple"),
    ]
    moe = name != BASE
    task = f"{'moe_' if moe else ''}image_classification"
    # The balance loss and the metrics are left out for einsum: in its favour.
    criterion = "image_classification" if name == EINSUM else task
    arch = "swin_v2_moe" if moe else "swin_v2"
    words += ["--task", task, "--criterion", criterion, "--arch", arch]
    if moe:
        words += ["--moe-expert-count", options.experts, "--moe-gate-type", "linear"]
        words += ["--moe-capacity-factor", options.capacity]
        words += ["--moe-eval-capacity-factor", options.capacity]
        # Released models prefer patches that are sure (bpr), which einsum's cannot.
        words += ["--moe-drop-policy", "position"]
        words += ["--swin-expert-dropout", 0]
    built = built_on(data, list(map(str, words)), device)
    if name == EINSUM:
        replaced(built.model, MoEFeedForward, EinsumFeedForward)
    built.model.to(device)
    return built


def _heads(options: argparse.Namespace) -> str:
    """Return the heads of every stage: of 32 dimensions, as published."""
    stages = range(len(options.depths.split(",")))
    return ",".join(str(max(1, options.embed_dim * 2**stage // 32)) for stage in stages)


def _sample(images: int, side: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(images, 3, side, side, generator=generator)
    return {
        "id": torch.arange(images),
        "nsentences": images,
        "ntokens": images,
        "net_input": {"images": pixels},
        "target": torch.randint(CLASSES, (images,), generator=generator),
    }


if __name__ == "__main__":
    sys.exit(main())
