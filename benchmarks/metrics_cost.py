"""What the expert metrics cost of a training step, on this machine.

Two steps, each with and without metrics in turn: forward and backward of one MoE layer, where they are
what the layer records of a micro-batch; and an update of a small language model by fairseq's
Trainer (4 layers, 2 of them MoE), where they are all that is done for them, fairseq's meters included.

    OMP_NUM_THREADS=1 python benchmarks/metrics_cost.py
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from unittest.mock import patch

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer

from fairseq_tutel.comm.topology import Topology
from fairseq_tutel.config import MoEConfig
from fairseq_tutel.ffn_step import MoEFeedForward

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
    cases: dict[str, Callable[[int], tuple[Step, Step]]] = {
        "one layer": layer_steps,
        "one layer, padding": lambda tokens: layer_steps(tokens, padding=True),
        "an update": model_steps,
        "an update, JSON log": lambda tokens: model_steps(tokens, "--log-format", "json"),
    }
    for tokens in (1024, 6144):
        for name, make in cases.items():
            without, more, pairs = measure(*make(tokens), arguments.seconds)
            print(
                f"T={tokens} {name:20} {1e3 * without:8.2f} ms without, {1e6 * more:5.0f} us more with: "
                f"{100 * more / without:.2f} % ({pairs} pairs)",
                flush=True,
            )


def measure(without: Step, with_metrics: Step, seconds: float) -> tuple[float, float, int]:
    """Let two steps take turns for some seconds.

    Returns:
        Medians in seconds of CPU time: of the first, and of what the other takes more; the number of pairs.
    """
    steps, took, end = (without, with_metrics), ([], []), perf_counter() + seconds
    while perf_counter() < end or len(took[0]) < 10:
        for which in (0, 1) if len(took[0]) % 2 else (1, 0):
            begin = process_time()  # other work on the machine does not count
            steps[which]()
            took[which].append(process_time() - begin)
    warm = len(took[0]) // 10
    base, other = (times[warm:] for times in took)
    return median(base), median(b - a for a, b in zip(base, other, strict=True)), len(base)


def layer_steps(tokens: int, padding: bool = False) -> tuple[Step, Step]:
    """Return forward and backward of one layer that has recorded the micro-batch, and that has not."""
    config = MoEConfig(DIM, HIDDEN, EXPERTS, top_k=TOP_K, capacity_factor=1.0)
    layer = MoEFeedForward(config, Topology(), 1, "decoder.layers.0.fc1")
    x = torch.randn(tokens // SENTENCES, SENTENCES, DIM, requires_grad=True)
    dy = torch.randn_like(x)
    if padding:
        layer.padding_mask = torch.zeros(SENTENCES, tokens // SENTENCES, dtype=torch.bool)
        layer.padding_mask[0, -3:] = True

    def step(seen: bool) -> None:
        layer.seen = seen
        layer.zero_grad()
        layer(x).backward(dy)

    return lambda: step(True), lambda: step(False)


def model_steps(tokens: int, *words: str) -> tuple[Step, Step]:
    """Return an update of a model with its metrics left out, and with them."""
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

    def step_without() -> None:
        with no_metrics():
            step()

    return step_without, step


@contextmanager
def no_metrics() -> Iterator[None]:
    """Leave out what exists for metrics alone."""
    with (
        patch("fairseq_tutel.ffn_step.tally_of"),
        patch("fairseq_tutel.criterions.gate_loss.expert_log", return_value={}),
        patch("fairseq_tutel.criterions.moe_cross_entropy.reduce_expert_log"),
    ):
        yield


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
