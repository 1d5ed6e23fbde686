"""Chooses the first all-to-all algorithm of a training run, and makes the tuner for later updates."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairseq_tutel.moe.adaptive import TOKENS, is_tuned, static_strategy
from fairseq_tutel.moe.update_tuner import UpdateTuner
from fairseq_tutel.option import read
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.machine import Machine, typical
from fairseq_tutel.plugin.feed_forward import moe_layers
from fairseq_tutel.plugin.plans import tuned_algorithms
from fairseq_tutel.plugin.run_state import device_of
from fairseq_tutel.plugin.training.options import TaskConfig

logger = logging.getLogger(__name__)


def option(cfg: Any, key: str) -> Any:
    """Return the value of an option, or None if it is missing or cannot be resolved."""
    try:
        return getattr(cfg, key, None)
    except Exception:  # OmegaConf may fail to resolve the option's interpolation.
        return None


def choose_algorithm(model: nn.Module, task_cfg: Any, root: Any) -> None:
    """Choose the all-to-all algorithm from the batch size and the hardware profile. Collective.

    Without `--moe-a2a-algorithm auto`, the function changes nothing.
    """
    layers = moe_layers(model)
    if layers[0].config.a2a_algorithm != "auto":
        return
    machine = _machine_of(task_cfg, root)
    tokens, half = _tokens_of(root, task_cfg), root.common.fp16 or root.common.bf16
    strategies = [
        static_strategy(layer.config, layer.topology, tokens, machine, 2 if half else 4) for layer in layers
    ]
    # Rank 0 decides, because ranks with different files or GPUs might choose different algorithms.
    strategies = world.broadcast_object(strategies, "the agreement on --moe-a2a-algorithm auto")
    for layer, strategy in zip(layers, strategies, strict=True):
        layer.follow(strategy)
    logger.info(
        "--moe-a2a-algorithm auto: chose %s from the hardware profile of %s",
        strategies[0].algorithm,
        machine.name,
    )


def tuner_of(model: nn.Module, cfg: Any, task_cfg: Any, root: Any) -> UpdateTuner | None:
    """Return the tuner that chooses how MoE layers run during training, or None without tuning."""
    layers = moe_layers(model)
    first = layers[0]
    if not is_tuned(first.config) or first.topology.expert_parallel_size == 1:
        return None
    options = read(TaskConfig, task_cfg)
    choices: dict[str, Any] = {}
    machine = _machine_of(task_cfg, root)
    if first.config.adaptive != "auto":  # Only `--moe-adaptive auto` tunes both.
        choices = {"overlaps": (first.strategy.overlap,), "algorithms": (first.strategy.algorithm,)}
    elif options.moe_collective_plans:
        choices = {"algorithms": tuned_algorithms(first, task_cfg)}
    window = options.moe_adaptive_window
    return UpdateTuner(layers, window, machine=machine, **choices)


def _machine_of(task_cfg: Any, root: Any) -> Machine:
    path = read(TaskConfig, task_cfg).moe_machine_file
    name = torch.cuda.get_device_name() if device_of(root).type == "cuda" else None
    return Machine.from_json(Path(path)) if path else typical(name)


def _tokens_of(root: Any, task_cfg: Any) -> int:
    """Estimate the number of tokens in one micro-batch of a rank."""
    sentences = root.dataset.batch_size or 0
    per_sentence = option(task_cfg, "tokens_per_sample") or 32
    return root.dataset.max_tokens or sentences * per_sentence or TOKENS
