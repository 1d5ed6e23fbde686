"""What the log says of a model's experts when it is built: their facts, and what may surprise."""

import logging
from collections.abc import Sequence
from typing import Any

from fairseq_tutel.capacity import evaluates_as_in_training
from fairseq_tutel.comm.topology import Topology
from fairseq_tutel.config import MoEConfig

logger = logging.getLogger(__name__)


def announce(configs: Sequence[MoEConfig], topology: Topology, kernels: tuple[str, str]) -> None:
    """Log the experts of all MoE layers in a line; `kernels` is the backend and why."""
    first = configs[0]
    logger.info(
        "experts: %d MoE layers, %s experts, top-%d, hidden %d, capacity factor %g (evaluation %s), "
        "expert parallel size %d, replicas %d, %s kernels (%s)",
        len(configs),
        "/".join(map(str, dict.fromkeys(config.num_experts for config in configs))),
        first.top_k,
        first.hidden_dim,
        first.capacity_factor,
        _evaluation_capacity(first),
        topology.expert_parallel_size,
        topology.num_replicas,
        *kernels,
    )


def warn(config: MoEConfig, cfg: Any, has_decoder: bool) -> None:
    """Say what is asked for and has no effect, or another one than it seems.

    Args:
        config: of the first MoE layer.
        cfg: the model's configuration.
        has_decoder: whether a decoder's layer has experts.
    """
    if config.choice == "experts" and has_decoder:
        logger.warning(
            "--moe-choice experts lets a token's experts depend on later tokens: a decoder trained by it "
            "sees what it is to predict, and generates otherwise than it was trained"
        )
    if config.expert_type == "glu" and config.activation not in ("swish", "relu"):
        logger.warning(
            "--moe-expert-type glu gates with SiLU; --activation-fn %s holds for the dense layers only",
            config.activation,
        )
    if config.gate_types == ["hash"] and config.balance_loss not in ("", "none"):
        logger.info("--moe-balance-loss is logged, but a hash gate has nothing that it could train")
    if getattr(cfg, "num_workers_valid", -1) >= 0:
        logger.info("--num-workers-valid is not used: validation loads by --num-workers processes")


def _evaluation_capacity(config: MoEConfig) -> str:
    fraction = config.eval_capacity_token_fraction
    if evaluates_as_in_training(config):
        return "as in training"
    return f"{fraction:g} of the tokens" if fraction else f"{config.eval_capacity_factor:g}"
