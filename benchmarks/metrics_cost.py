"""Cost of the metrics in a training step.

Two kinds of steps run with and without metrics, in turns: forward and backward of one MoE layer, with its
counts of a micro-batch; and an update of a small language model by fairseq's Trainer (4 layers, 2 of them
MoE), with everything done for metrics, including fairseq's meters. The results are the difference of these
times and, less sensitive to other processes, the time inside the functions of metrics.

    OMP_NUM_THREADS=1 python benchmarks/metrics_cost.py
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.metrics import count_routing
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.criterions.expert_log import expert_log, reduce_expert_log
from fairseq_tutel.plugin.feed_forward import MoEFeedForward
from fairseq_tutel.plugin.training.own_layers import MoETrainer as Trainer

ROOT = Path(__file__).resolve().parents[1]
DIM, HIDDEN, EXPERTS, TOP_K = 128, 256, 8, 2
WORDS, SENTENCES = 5000, 16
Step = Callable[[], object]


def main() -> None:
    """Measure every case and print it as a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="time for each case")
    arguments = parser.parse_args()
    print(f"D={DIM} H={HIDDEN} E={EXPERTS} K={TOP_K}, {torch.get_num_threads()} thread(s); medians")
    cases: dict[str, Callable[[int], Step]] = {
        "one layer": layer_step,
        "one layer, padding": lambda tokens: layer_step(tokens, padding=True),
        "an update": update_step,
        "an update, JSON log": lambda tokens: update_step(tokens, "--log-format", "json"),
    }
    for tokens in (1024, 6144):
        for name, make in cases.items():
            without, more, inside, pairs = measure(make(tokens), arguments.seconds)
            print(
                f"T={tokens} {name:20} {1e3 * without:8.2f} ms without; with them "
                f"{1e6 * more:5.0f} us or {100 * more / without:5.2f} % more, inside them "
                f"{1e6 * inside:5.0f} us or {100 * inside / without:4.2f} % ({pairs} pairs)",
                flush=True,
            )


def measure(step: Step, seconds: float) -> tuple[float, float, float, int]:
    """Run a step with and without metrics, in turns, for some seconds.

    Returns:
        Median CPU seconds of a step without metrics, of the difference, and of the functions of metrics;
        and the number of pairs.
    """
    took: dict[bool, list[float]] = {False: [], True: []}
    inside = []
    end = perf_counter() + seconds
    while perf_counter() < end or len(inside) < 10:
        for with_metrics in (False, True) if len(inside) % 2 else (True, False):
            with clocked() if with_metrics else no_metrics() as spent:
                begin = process_time()  # other work on the machine does not count
                step()
                took[with_metrics].append(process_time() - begin)
            if with_metrics:
                inside.append(sum(spent))
    warm = len(inside) // 10
    without = took[False][warm:]
    more = [b - a for a, b in zip(without, took[True][warm:], strict=True)]
    return median(without), median(more), median(inside[warm:]), len(without)


@contextmanager
def no_metrics() -> Iterator[list[float]]:
    """Disable all functions of metrics."""
    with (
        patch("fairseq_tutel.plugin.feed_forward.count_routing", lambda routing: None),
        patch("fairseq_tutel.plugin.criterions.gate_loss.expert_log", lambda *_, **__: {}),
        patch("fairseq_tutel.plugin.criterions.moe_cross_entropy.reduce_expert_log", lambda logs: None),
    ):
        yield []


@contextmanager
def clocked() -> Iterator[list[float]]:
    """Yield a list that collects the seconds of each call of the functions of metrics."""
    spent: list[float] = []

    def clock(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = process_time()
            result = function(*arguments, **options)
            spent.append(process_time() - begin)
            return result

        return timed

    with (
        patch("fairseq_tutel.plugin.feed_forward.count_routing", clock(count_routing)),
        patch("fairseq_tutel.plugin.criterions.gate_loss.expert_log", clock(expert_log)),
        patch(
            "fairseq_tutel.plugin.criterions.moe_cross_entropy.reduce_expert_log", clock(reduce_expert_log)
        ),
    ):
        yield spent


def layer_step(tokens: int, padding: bool = False) -> Step:
    """Return forward and backward of one layer."""
    config = MoEConfig(DIM, HIDDEN, EXPERTS, top_k=TOP_K, capacity_factor=1.0)
    layer = MoEFeedForward(config, Topology(), 1, "decoder.layers.0.fc1")
    x = torch.randn(tokens // SENTENCES, SENTENCES, DIM, requires_grad=True)
    dy = torch.randn_like(x)
    if padding:
        mask = torch.zeros(SENTENCES, tokens // SENTENCES, dtype=torch.bool)
        mask[0, -3:] = True
        layer.begin_call(mask)

    def step() -> None:
        layer.begin_micro_batch()
        layer.zero_grad()
        layer(x).backward(dy)

    return step


def update_step(tokens: int, *words: str) -> Step:
    """Return an update of a small model, with one micro-batch."""
    trainer = small_trainer(*words)
    text = torch.randint(4, WORDS, (SENTENCES, tokens // SENTENCES + 1))
    lengths = torch.full((SENTENCES,), text.shape[1] - 1)
    sample = {
        "id": torch.arange(SENTENCES),
        "nsentences": SENTENCES,
        "ntokens": tokens,
        "net_input": {"src_tokens": text[:, :-1].contiguous(), "src_lengths": lengths},
        "target": text[:, 1:].contiguous(),
    }

    def step() -> None:
        with metrics.aggregate("train"), metrics.aggregate("train_inner"):
            trainer.train_step([sample])

    return step


def small_trainer(*words: str) -> Trainer:
    """Return fairseq's Trainer of a language model with 5000 words."""
    with TemporaryDirectory() as data:
        Path(data, "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(WORDS - 4)))
        arguments = [
            data, "--user-dir", ROOT / "user_dir", "--cpu", "--task", "moe_language_modeling",
            "--arch", "moe_transformer_lm", "--criterion", "moe_cross_entropy",
            "--optimizer", "moe_adam", "--lr", 0.001, "--clip-norm", 1, "--tokens-per-sample", 512,
            "--decoder-layers", 4, "--decoder-attention-heads", 4, "--decoder-embed-dim", DIM,
            "--decoder-input-dim", DIM, "--decoder-output-dim", DIM, "--decoder-ffn-embed-dim", HIDDEN,
            "--share-decoder-input-output-embed", "--moe-freq", 2, "--moe-expert-count", EXPERTS,
            "--moe-top-k", TOP_K, "--moe-capacity-factor", 1, "--log-format", "simple", *words,
        ]  # fmt: skip
        parser = options.get_training_parser()
        cfg = convert_namespace_to_omegaconf(
            options.parse_args_and_arch(parser, input_args=list(map(str, arguments)))
        )
        task = tasks.setup_task(cfg.task)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    trainer = Trainer(cfg, task, model, criterion)
    trainer.begin_epoch(1)
    return trainer


if __name__ == "__main__":
    main()
