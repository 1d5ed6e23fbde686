"""Builds fairseq's dense and MoE models with fairseq's Trainer, without a command line.

Both kinds of models have equal active FLOPs. Tokens are random, so no data folder is needed.
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch import nn

from fairseq_tutel.plugin.training.own_layers import MoETrainer as Trainer

USER_DIR = Path(__file__).resolve().parents[1] / "user_dir"
# Special symbols of a dictionary: begin, padding, end, unknown.
SPECIAL = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model and of its micro-batches.

    Attributes:
        arch: architecture of a language model (lm is a part of the name) or of an encoder-decoder.
        layers: number of layers of the encoder, and of the decoder.
        model_dim, ffn_dim, heads: sizes of a layer; ffn_dim is also the hidden dimension of an expert.
        experts, top_k, freq: every freq-th layer has experts, and a token uses top_k of these.
        words: size of the vocabulary.
        sentences, tokens: number of sentences per micro-batch, and of tokens per sentence on each side.
        update_freq: number of micro-batches per update.
    """

    arch: str
    layers: int = 6
    model_dim: int = 512
    ffn_dim: int = 2048
    heads: int = 8
    experts: int = 8
    top_k: int = 1
    freq: int = 2
    words: int = 8192
    sentences: int
    tokens: int
    update_freq: int = 2

    @property
    def is_lm(self) -> bool:
        """Whether the model is a language model, which has no encoder."""
        return "lm" in self.arch

    @property
    def dense_ffn_dim(self) -> int:
        """FFN dimension of the dense model of equal FLOPs: one layer in freq has top_k experts."""
        return self.ffn_dim * (self.freq - 1 + self.top_k) // self.freq

    def tiny(self) -> "Shape":
        """Return a small model of the same kind, whose step needs only milliseconds."""
        sizes = {"layers": 2, "model_dim": 16, "ffn_dim": 32, "heads": 2, "experts": 4}
        return replace(self, **sizes, words=64, sentences=2, tokens=8)


# Hide fairseq's line for every built model and the deprecation warnings, which would clutter the tables.
logging.disable(logging.INFO)
warnings.filterwarnings("ignore")

SHAPES = {
    "moe_transformer_lm_gpt": Shape(arch="moe_transformer_lm_gpt", sentences=8, tokens=512),
    "moe_transformer": Shape(arch="moe_transformer", sentences=32, tokens=64),
    # examples/language_model.sh
    "language_model_recipe": Shape(
        arch="moe_transformer_lm",
        layers=4,
        model_dim=128,
        ffn_dim=256,
        heads=4,
        top_k=2,
        freq=1,
        words=4000,
        sentences=8,
        tokens=128,
        update_freq=1,
    ),
}


def words_of(shape: Shape, *, moe: bool, balanced: bool = True, optimizer: str = "moe_adam") -> list[str]:
    """Return the arguments of fairseq-train, without the data.

    Args:
        shape: sizes of the model.
        moe: whether to use the architecture with experts; otherwise fairseq's architecture.
        balanced: whether a MoE model has our criterion, which adds the balance loss and logs loads.
        optimizer: optimizer's name; moe_adam is Adam with torch's fused kernel, for dense models too.
    """
    prefix = "moe_" if moe else ""
    criterion = "cross_entropy" if shape.is_lm else "label_smoothed_cross_entropy"
    task = "language_modeling" if shape.is_lm else "translation"
    words: list[Any] = [
        *("--user-dir", USER_DIR, "--task", prefix + task),
        *("--arch", prefix + shape.arch.removeprefix("moe_")),
        *("--criterion", ("moe_" if moe and balanced else "") + criterion),
        *("--optimizer", optimizer, "--lr", 0.0001, "--clip-norm", 1),
        # Dropout is off, because it would slow down both models equally.
        *("--dropout", 0, "--attention-dropout", 0, "--log-format", "simple"),
    ]
    for side in ("decoder",) if shape.is_lm else ("encoder", "decoder"):
        ffn_dim = shape.ffn_dim if moe else shape.dense_ffn_dim
        words += [f"--{side}-layers", shape.layers, f"--{side}-embed-dim", shape.model_dim]
        words += [f"--{side}-ffn-embed-dim", ffn_dim, f"--{side}-attention-heads", shape.heads]
    if shape.is_lm:
        words += ["--tokens-per-sample", shape.tokens, "--share-decoder-input-output-embed"]
        words += ["--decoder-input-dim", shape.model_dim, "--decoder-output-dim", shape.model_dim]
    else:
        words += ["-s", "src", "-t", "tgt", "--share-all-embeddings"]
    if moe:
        words += ["--moe-freq", shape.freq, "--moe-expert-count", shape.experts]
        words += ["--moe-top-k", shape.top_k]
    return list(map(str, words))


@dataclass(frozen=True)
class Built:
    """A model, and the other arguments of fairseq's Trainer."""

    cfg: Any
    task: Any
    model: nn.Module

    def trainer(self) -> Trainer:
        """Return fairseq's Trainer of the model, at the beginning of an epoch."""
        criterion = self.task.build_criterion(self.cfg.criterion)
        trainer = Trainer(self.cfg, self.task, self.model, criterion)
        trainer.begin_epoch(1)
        return trainer


def build(shape: Shape, words: list[str], device: torch.device) -> Built:
    """Build the model of a command line; its random weights have a fixed seed.

    Args:
        shape: sizes of the model; the vocabulary has `shape.words` words.
        words: arguments from `words_of`.
        device: device of the Trainer.
    """
    with TemporaryDirectory() as data:
        text = "".join(f"w{i} 1\n" for i in range(shape.words - SPECIAL))
        for name in ("dict.txt", "dict.src.txt", "dict.tgt.txt"):
            Path(data, name).write_text(text)
        on_cpu = ["--cpu"] if device.type == "cpu" else []
        parser = options.get_training_parser()
        cfg = convert_namespace_to_omegaconf(
            options.parse_args_and_arch(parser, input_args=[data, *on_cpu, *words])
        )
        task = tasks.setup_task(cfg.task)
        torch.manual_seed(1)
        return Built(cfg, task, task.build_model(cfg.model))


def samples_of(shape: Shape) -> list[dict[str, Any]]:
    """Return the micro-batches of one update, of random words without padding."""
    return [_sample(shape, seed) for seed in range(shape.update_freq)]


def _sample(shape: Shape, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    # One more token than the model reads, because targets are the inputs shifted by one position.
    size = (shape.sentences, shape.tokens + 1)
    source, target = (torch.randint(SPECIAL, shape.words, size, generator=generator) for _ in range(2))
    lengths = torch.full((shape.sentences,), shape.tokens)
    read = {"src_tokens": source[:, :-1].contiguous(), "src_lengths": lengths}
    predicted = source
    if not shape.is_lm:
        read["prev_output_tokens"] = target[:, :-1].contiguous()
        predicted = target
    return {
        "id": torch.arange(shape.sentences),
        "nsentences": shape.sentences,
        "ntokens": shape.sentences * shape.tokens,
        "net_input": read,
        "target": predicted[:, 1:].contiguous(),
    }


def replaced(model: nn.Module, kind: type, make: Callable[[Any], nn.Module]) -> nn.Module:
    """Replace every module of a type by make(module), in place; return the model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                setattr(parent, name, make(child))
    return model
