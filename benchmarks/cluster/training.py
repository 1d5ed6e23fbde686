"""An update of a language model by fairseq's Trainer: every static choice, and --moe-adaptive auto."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.settings import Settings
from benchmarks.cluster.timing import Step, interleaved, summary
from benchmarks.cluster.tuning import FINAL_REPEATS, canonical, static_choices
from fairseq_tutel.parallel.strategy import Strategy

ROOT = Path(__file__).resolve().parents[2]
WORDS, SENTENCES, LAYERS = 1000, 8, 2
MOST_STEPS = 300


def training(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield, for every number of tokens, all static choices and then the tuner's, measured in turns."""
    for tokens in settings.tokens:
        with TemporaryDirectory() as folder:
            yield from _of(settings, tokens, folder)


def _of(settings: Settings, tokens: int, folder: str) -> Iterator[dict[str, Any]]:
    trainer = _trainer(settings, folder)
    tuner, update = trainer.task.moe_tuner, _update_of(trainer, tokens)
    for _ in range(MOST_STEPS):
        update()
        if tuner.tuner.best:
            break
    (chosen,) = {canonical(strategy) for strategy in tuner.tuner.best.values()} or {Strategy()}
    steps: dict[Any, Step] = {
        strategy: _static(trainer, strategy, update) for strategy in static_choices(settings)
    }
    took = interleaved(steps, settings.repeats)
    cell = {"tokens": tokens}
    for strategy, times in took.items():
        yield {"section": "training_static", **cell, **asdict(strategy), **summary(times)}
    best = min(took, key=lambda strategy: median(took[strategy]))
    # Anew and in turns: the least of many medians flatters itself.
    both = {"auto": _tuned(trainer, tuner, update), "best": steps[best]}
    again = interleaved(both, FINAL_REPEATS * settings.repeats)
    auto, best_seconds = again["auto"], median(again["best"])
    yield {
        "section": "training",
        **cell,
        **asdict(chosen),
        **summary(auto),
        "settled": bool(tuner.tuner.best),
        "best": asdict(best),
        "best_seconds": best_seconds,
        "regret": median(auto) / best_seconds - 1,
        "gain_over_worst": max(map(median, took.values())) / median(auto),
    }


def _static(trainer: Any, strategy: Strategy, update: Step) -> Step:
    from fairseq_tutel.plugin.feed_forward import moe_layers

    layers = moe_layers(trainer.get_model())

    def step() -> None:
        trainer.task.moe_tuner = None
        for layer in layers:
            layer.follow(strategy)
        update()

    return step


def _tuned(trainer: Any, tuner: Any, update: Step) -> Step:
    def step() -> None:
        trainer.task.moe_tuner = tuner
        update()

    return step


def _update_of(trainer: Any, tokens: int) -> Step:
    """Return an update of one micro-batch of so many tokens."""
    from fairseq.logging import metrics

    sentences = min(SENTENCES, tokens)
    generator = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(4, WORDS, (sentences, tokens // sentences + 1), generator=generator)
    sample = {
        "id": torch.arange(sentences),
        "nsentences": sentences,
        "ntokens": text[:, 1:].numel(),
        "net_input": {
            "src_tokens": text[:, :-1].contiguous(),
            "src_lengths": torch.full((sentences,), text.shape[1] - 1),
        },
        "target": text[:, 1:].contiguous(),
    }

    def step() -> None:
        with metrics.aggregate("train"), metrics.aggregate("train_inner"):
            trainer.train_step([sample])

    return step


def _trainer(settings: Settings, folder: str) -> Any:
    """Return fairseq's Trainer of a language model with as many experts as the tuner's layer."""
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.distributed import utils as distributed

    from fairseq_tutel.plugin.training.own_layers import MoETrainer as Trainer

    Path(folder, "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(WORDS - 4)))
    arguments = [
        folder, "--user-dir", ROOT / "user_dir", "--cpu", "--task", "moe_language_modeling",
        "--arch", "moe_transformer_lm", "--criterion", "moe_cross_entropy",
        "--optimizer", "moe_adam", "--lr", 0.001, "--clip-norm", 1, "--tokens-per-sample", 512,
        "--decoder-layers", LAYERS, "--decoder-attention-heads", 4,
        "--decoder-embed-dim", settings.model_dim, "--decoder-input-dim", settings.model_dim,
        "--decoder-output-dim", settings.model_dim, "--decoder-ffn-embed-dim", settings.hidden_dim,
        "--share-decoder-input-output-embed", "--moe-freq", 1, "--moe-top-k", 1,
        "--moe-capacity-factor", 1.25,
        "--moe-expert-count", settings.experts, "--moe-expert-parallel-size", settings.world_size,
        "--moe-local-size", settings.local, "--moe-adaptive", "auto", "--save-dir", folder,
        "--distributed-world-size", settings.world_size, "--ddp-backend", "legacy_ddp",
        "--distributed-rank", dist.get_rank(), "--distributed-no-spawn", "--log-format", "simple",
    ]  # fmt: skip
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(parser, input_args=list(map(str, arguments)))
    )
    cfg.distributed_training.distributed_rank = dist.get_rank()
    distributed.get_global_group()
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    trainer = Trainer(cfg, task, model, criterion)
    trainer.begin_epoch(1)
    return trainer
