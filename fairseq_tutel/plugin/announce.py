"""Logs the settings and size of a model's experts when it is built, and warns of options without effect."""

import logging
import math
from collections.abc import Iterator, Sequence

from torch import nn

from fairseq_tutel.moe.capacity import evaluates_as_in_training
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.plugin.options import ModelConfig
from fairseq_tutel.plugin.training.options import TaskConfig

logger = logging.getLogger(__name__)


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


def warn_of_no_effect(layers: Sequence[MoELayer], model: ModelConfig, task: TaskConfig) -> None:
    """Warn of options that users set in vain, because another option or more ranks are missing."""
    config, topology = layers[0].config, layers[0].topology
    if topology.rank != 0:
        return
    one_rank, all_local = topology.world_size == 1, topology.expert_parallel_size == 1
    limited = config.capacity_factor or config.eval_capacity_factor or config.eval_capacity_token_fraction
    reasons = {
        "no capacity is set, such as --moe-capacity-factor 1": {
            "--moe-drop-policy": not limited and config.drop_policy != "position",
            "--moe-min-capacity": not limited and config.min_capacity > 0,
        },
        "every rank has all experts": {
            "--moe-adaptive": all_local and config.adaptive == "auto",
            "--moe-a2a-algorithm": all_local and config.a2a_algorithm != "linear",
            "--moe-a2a-ffn-overlap-degree": all_local and config.a2a_ffn_overlap_degree > 1,
            "--moe-local-drop": all_local and model.moe_local_drop > 0,
        },
        "the run has only one rank": {"--moe-zero-stage": one_rank and task.moe_zero_stage > 0},
    }
    for reason, flags in reasons.items():
        for flag in (flag for flag, is_in_vain in flags.items() if is_in_vain):
            logger.warning("%s has no effect: %s", flag, reason)


def warn_of_surprises(config: MoEConfig, has_decoder: bool) -> None:
    """Warn of MoE options that are often misunderstood."""
    if config.choice == "experts" and has_decoder:
        logger.warning(
            "with --moe-choice experts, a token's experts depend on later tokens: a decoder then trains "
            "with information about the tokens that it predicts, which is missing in generation"
        )


def _counts(counts: list[int]) -> str:
    return "/".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
