"""Logs the settings and size of a model's experts when it is built, and warns of options without effect."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fairseq_tutel.moe.adaptive import is_tuned
from fairseq_tutel.moe.capacity import evaluates_as_in_training
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.option_table import ModelConfig, SidesConfig, StoreConfig, TaskConfig
from fairseq_tutel.option import options_in, read

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of a run that decide which options have an effect."""

    layer: MoEConfig  # configuration of the first MoE layer
    sides: SidesConfig
    ranks: int = 1
    expert_parallel_size: int = 1
    slices: int = 1  # the largest number of shards of an expert in any layer
    adaptive_r: int = 1  # the value in the first MoE layer
    over_nodes: bool = False  # whether each EP group consists of several complete nodes
    ranks_per_node: int = 0  # 0 if unknown
    half: bool = False  # whether the model computes in fp16 or bf16
    gpu: bool = False
    plans: bool = False  # whether collective plans are given
    pregated: bool = False  # whether gates read the input of an earlier layer
    tuned: bool = False  # whether the tuner chooses the layers' strategy
    store: StoreConfig = field(default_factory=StoreConfig)
    opened: bool = False  # whether the model is opened from a checkpoint for inference


def warn_of_no_effect(config: Any, facts: Facts) -> None:
    """Warn of every option in `config` that differs from the default value but has no effect."""
    for option in options_in(type(config)):
        value = getattr(config, option.name)
        condition = next((each for each in option.no_effect if each.holds(facts)), None)
        if condition is not None and value != option.default:
            shown = "" if value is True else f" {value}"
            words = condition.words.format(f=facts)
            logger.warning("%s%s has no effect%s", option.flag, shown, words)


def log_experts(layers: Sequence[MoELayer], kernels: tuple[str, str]) -> None:
    """Log the settings of all MoE layers in one line, including the backend (`kernels`)."""
    config, topology = layers[0].config, layers[0].topology
    fraction = config.eval_capacity_token_fraction
    evaluation = f"{fraction:g} of the tokens" if fraction else f"{config.eval_capacity_factor:g}"
    logger.info(
        "experts: %d MoE layers, %s experts, top-%d, hidden %d, capacity factor %g (evaluation %s), "
        "expert parallel size %d, replicas %d, %s kernels (%s)%s",
        len(layers),
        _counts([layer.config.num_experts for layer in layers]),
        config.top_k,
        config.hidden_dim,
        config.capacity_factor,
        "as in training" if evaluates_as_in_training(config) else evaluation,
        topology.expert_parallel_size,
        topology.num_replicas,
        *kernels,
        ", hidden layers recomputed in backward" if config.recompute_experts else "",
    )


def log_size(model: nn.Module) -> None:
    """Log the number of a model's parameters on all ranks."""
    total, active, flops, experts = sizes(model)
    logger.info(
        "parameters on all ranks: %s, of experts: %s, active per token: %s; forward FLOPs per token "
        "without attention scores: %s",
        *(f"{number:,}" for number in (total, experts, active, flops)),
    )


def sizes(model: nn.Module) -> tuple[int, int, int, int]:
    """Return a model's parameter counts (all, active per token, experts only) and FLOPs per token."""
    total, active, products, experts = 0, 0, 0, 0
    for module, _, shape, is_new in _parameters(model):
        size, copies, visited = math.prod(shape), 1, 1
        if isinstance(module, ExpertStack):
            copies, visited = module.config.num_experts, module.config.top_k
        if len(shape) > 1 and not isinstance(module, nn.Embedding):
            products += size * visited
        if is_new:
            total, active = total + size * copies, active + size * visited
            experts += size * copies if isinstance(module, ExpertStack) else 0
    return total, active, 2 * products, experts


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter, tuple[int, ...], bool]]:
    """Yield (module, parameter, shape, whether it is new) for each use of a parameter in a model.

    For stacked experts, the shape is that of one complete expert. A tied parameter is new only once.
    """
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, ExpertStack):
            shapes = {name: module.whole_shape(name) for name in module.expert_parameters()}
        else:
            shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        for name, shape in shapes.items():
            yield module, own[name], shape, own[name] not in seen
        seen.update(own.values())


def log_exchange(layers: Sequence[MoELayer]) -> None:
    """Log how MoE layers exchange rows, if experts are spread over several ranks."""
    config, strategy, topology = layers[0].config, layers[0].strategy, layers[0].topology
    if topology.expert_parallel_size == 1:
        return
    tuned = {"auto": "adaptive_r"}.get(config.parallel_type, "nothing")
    logger.info(
        "experts across ranks: shards of an expert %s, adaptive_r %s, overlap %d, %s all-to-all, %s "
        "buffers, transfer dtype %s, tuned: %s",
        _counts([layer.experts.part.slices for layer in layers]),
        _counts([layer.strategy.adaptive_r for layer in layers]),
        strategy.overlap,
        strategy.algorithm if strategy.plan or topology.grid is not None else "linear",
        config.exchange,
        config.a2a_dtype,
        "adaptive_r, overlap, all-to-all" if config.adaptive == "auto" else tuned,
    )


def warn_of_options(
    layers: Sequence[MoELayer], model_cfg: Any, options: TaskConfig, local: int, half: bool
) -> None:
    """Warn of model and task options that have no effect in this training run.

    Options of the criterion are checked when it is built.
    """
    first, sides = layers[0], read(SidesConfig, model_cfg)
    if first.topology.rank != 0:
        return
    facts = Facts(
        layer=first.config,
        sides=sides,
        ranks=first.topology.world_size,
        expert_parallel_size=first.topology.expert_parallel_size,
        slices=max(layer.experts.part.slices for layer in layers),
        adaptive_r=first.strategy.adaptive_r,
        over_nodes=first.topology.grid is not None,
        ranks_per_node=local,
        half=half,
        gpu=torch.cuda.is_available(),
        plans=bool(options.moe_collective_plans),
        pregated=read(ModelConfig, model_cfg).moe_pregate > 0,
        tuned=is_tuned(first.config),
    )
    for config in (first.config, read(ModelConfig, model_cfg), sides, options):
        warn_of_no_effect(config, facts)


def warn_of_surprises(config: MoEConfig, has_decoder: bool) -> None:
    """Warn of MoE options that are often misunderstood."""
    if config.choice == "experts" and has_decoder:
        logger.warning(
            "with --moe-choice experts, a token's experts depend on later tokens: a decoder then trains "
            "with information about the tokens that it predicts, which is missing in generation"
        )


def _counts(counts: list[int]) -> str:
    return "/".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
