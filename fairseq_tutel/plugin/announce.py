"""Logs the settings and the parameter counts of a model with experts when the model is built."""

import logging
import math
from collections.abc import Sequence

from torch import nn

from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.slots import evaluates_as_in_training

logger = logging.getLogger(__name__)


def log_experts(layers: Sequence[MoELayer], kernels: tuple[str, str]) -> None:
    """Log the settings of all MoE layers in one line, including the backend (`kernels`)."""
    config, topology = layers[0].config, layers[0].topology
    fraction = config.eval_capacity_token_fraction
    evaluation = f"{fraction:g} of the tokens" if fraction else f"{config.eval_capacity_factor:g}"
    counts = [layer.config.num_experts for layer in layers]
    logger.info(
        "experts: %d MoE layers, %s experts, top-%d, hidden %d, capacity factor %g (evaluation %s), "
        "expert parallel size %d, replicas %d, %s kernels (%s)%s",
        len(layers),
        "/".join(map(str, counts if len({*counts}) > 1 else counts[:1])),
        config.top_k,
        config.hidden_dim,
        config.capacity_factor,
        "as in training" if evaluates_as_in_training(config) else evaluation,
        topology.expert_parallel_size,
        topology.num_replicas,
        *kernels,
        f", {layers[0].strategy}" if topology.expert_parallel_size > 1 else "",
    )
    if config.choice == "experts" and any("decoder" in layer.name for layer in layers):
        logger.warning(
            "with --moe-choice experts, a token's experts depend on later tokens: a decoder then trains "
            "with information about the tokens that it predicts, which is missing in generation"
        )


def log_size(model: nn.Module) -> None:
    """Log the numbers that `sizes` returns; they include the experts of all ranks."""
    logger.info(
        "parameters on all ranks: %s, active per token: %s, of experts: %s",
        *(f"{number:,}" for number in sizes(model)),
    )


def sizes(model: nn.Module) -> tuple[int, int, int]:
    """Return a model's numbers of parameters (all, active per token, experts); count tied weights once."""
    total, active, experts = 0, 0, 0
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, ExpertStack):
            of_one = sum(math.prod(module.whole_shape(name)) for name in module.expert_parameters())
            experts += of_one * module.config.num_experts
            active += of_one * module.config.top_k
        else:
            new = sum(parameter.numel() for parameter in own.values() if parameter not in seen)
            total, active = total + new, active + new
        seen.update(own.values())
    return total + experts, active, experts
