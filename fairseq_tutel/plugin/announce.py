"""What the log says of a model's experts when it is built: their facts, and what may surprise."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fairseq_tutel.moe.config import MoEConfig, label_of, options_of_scope
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.initial_strategy import is_tuned
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.slots import evaluates_as_in_training
from fairseq_tutel.plugin.flags import ModelOptions, defaults
from fairseq_tutel.ranks.groups import Topology

logger = logging.getLogger(__name__)

# In the first line of `announce` already.
SHOWN = ("top_k", "capacity_factor", "eval_capacity_factor", "eval_capacity_token_fraction")
# Options that another one must be on for: whether it is, and its name.
NEEDS: dict[str, tuple[Callable[[MoEConfig], bool], str]] = {
    **dict.fromkeys(
        ("drop_policy", "min_capacity", "capacity_multiple"),
        (
            lambda c: bool(
                c.capacity_factor or c.eval_capacity_factor or c.eval_capacity_token_fraction > 0
            ),
            "a capacity, such as --moe-capacity-factor 1",
        ),
    ),
    "bias_update_rate": (lambda c: c.balance_bias, "--moe-balance-bias"),
    **dict.fromkeys(
        ("gate_temperature", "gate_projection_dim"),
        (lambda c: "cosine" in c.gate_types, "--moe-gate-type cosine"),
    ),
    **dict.fromkeys(
        ("second_expert_policy", "normalize_gate"),
        (lambda c: c.top_k > 1, "--moe-top-k 2 or more"),
    ),
    "groups_per_token": (
        lambda c: c.groups_per_token < c.expert_groups,
        "more --moe-expert-groups than that",
    ),
}


# System options that have their effect on one rank too.
LOCAL = ("backend", "recompute_experts")


def announce(configs: Sequence[MoEConfig], topology: Topology, kernels: tuple[str, str]) -> None:
    """Log the experts of all MoE layers in a line; `kernels` is the backend and why."""
    first = configs[0]
    logger.info(
        "experts: %d MoE layers, %s experts, top-%d, hidden %d, capacity factor %g (evaluation %s), "
        "expert parallel size %d, replicas %d, %s kernels (%s)%s",
        len(configs),
        _counts([config.num_experts for config in configs]),
        first.top_k,
        first.hidden_dim,
        first.capacity_factor,
        _evaluation_capacity(first),
        topology.expert_parallel_size,
        topology.num_replicas,
        *kernels,
        ", hidden layers made again in backward" if first.recompute_experts else "",
    )
    changed = [
        f"{option.name} {getattr(first, option.name)}"
        for option in options_of_scope("model")
        if option.name not in SHOWN and getattr(first, option.name) != option.default
    ]
    if changed:
        logger.info("experts, not by default: %s", ", ".join(changed))


def announce_size(model: nn.Module) -> None:
    """Log a model's parameters, on all ranks together; stock counts experts as one rank holds them."""
    total, active, flops = sizes(model)
    logger.info(
        "parameters: %s in all, %s of them for a token; %s FLOPs a token forward, attention's scores apart",
        *(f"{number:,}" for number in (total, active, flops)),
    )


def sizes(model: nn.Module) -> tuple[int, int, int]:
    """Return a model's parameters, those that one token meets, and the FLOPs of its products with them."""
    total, active, products = 0, 0, 0
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        copies, visited = 1, 1
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        if isinstance(module, ExpertStack):
            copies, visited = module.config.num_experts, module.config.top_k
            shapes = {name: module.whole_shape(name) for name in module.expert_parameters()}
        for name, shape in shapes.items():
            size = math.prod(shape)
            if len(shape) > 1 and not isinstance(module, nn.Embedding):
                products += size * visited
            if own[name] not in seen:  # else tied
                total, active = total + size * copies, active + size * visited
        seen.update(own.values())
    return total, active, 2 * products


def announce_exchange(layers: Sequence[MoELayer], local: int, half: bool) -> None:
    """Log how the layers' rows travel, and what is asked for and has no effect.

    Args:
        layers: of the model.
        local: ranks of a node; 0 where nobody says.
        half: the model computes in fp16 or bf16.
    """
    first = layers[0]
    size, strategy, config = first.topology.expert_parallel_size, first.strategy, first.config
    if size > 1:
        logger.info(
            "experts across ranks: slices of an expert %s, adaptive_r %s, overlap %d, %s all-to-all, %s "
            "buffers, %s wire, tuned: %s",
            _counts([layer.experts.part.slices for layer in layers]),
            _counts([layer.strategy.adaptive_r for layer in layers]),
            strategy.overlap,
            strategy.algorithm if first.topology.grid is not None else "linear",
            config.exchange,
            config.a2a_dtype,
            {"auto": "all but the last two"}.get(config.adaptive)
            or {"auto": "adaptive_r"}.get(config.parallel_type, "nothing"),
        )
    if first.topology.rank > 0:
        return
    if config.expert_grad_norm != "world_size" and first.topology.world_size == 1:
        name = label_of("expert_grad_norm")
        logger.warning("%s %s has no effect: there is one rank", name, config.expert_grad_norm)
    slices = max(layer.experts.part.slices for layer in layers)
    asked = [
        option.name
        for option in options_of_scope("system")
        if option.name not in LOCAL and getattr(config, option.name) != option.default
    ]
    stays = ("exchange", "a2a_algorithm", "a2a_dtype", "a2a_ffn_overlap_degree")
    for name in asked:
        value, reason = getattr(config, name), ""
        if name == "kernel_tuning_seconds":
            reason = "" if torch.cuda.is_available() else "kernels are timed on a GPU alone"
        elif size == 1:
            reason = "every rank has all experts"
        elif name == "a2a_algorithm" and value == "2dh" and first.topology.grid is None:
            reason = f"rows go among {size} ranks, which are not several whole nodes of {local}"
        elif name in stays and strategy.adaptive_r == 0 and not is_tuned(config):
            reason = "with adaptive_r 0 no row travels"
        elif name == "a2a_dtype" and value == "bf16" and half:
            reason = "rows are in half precision as they are"
        elif name == "adaptive_r" and value > slices:
            reason = f"an expert has {slices} ranks, and {slices} is taken"
        elif name == "parallel_type" and value != "auto" and config.adaptive_r >= 0:
            reason = "--moe-adaptive-r is given"
        elif name in ("adaptive_r", "parallel_type") and value != "auto" and is_tuned(config):
            reason = "the tuner chooses; it is what its gain is told against"
        if reason:
            logger.warning("%s %s has no effect: %s", label_of(name), value, reason)


def warn_of_files(config: MoEConfig, task_cfg: Any, rank: int) -> None:
    """Say which of the task's own options about ranks, the tuner and the machine nobody will read."""
    tuned, modelled = is_tuned(config), config.a2a_algorithm == "auto"
    by_node = config.a2a_algorithm != "linear" or config.adaptive == "auto"
    for key, default, read, needs in (
        ("moe_local_size", 0, by_node, "--moe-a2a-algorithm 2dh or auto, or --moe-adaptive auto"),
        ("moe_machine_file", "", modelled, "--moe-a2a-algorithm auto"),
        ("moe_adaptive_file", "", tuned, "--moe-adaptive auto"),
        ("moe_adaptive_window", 128, tuned, "--moe-adaptive auto"),
    ):
        value = getattr(task_cfg, key, default)
        if value != default and not read and rank == 0:
            flag = key.replace("_", "-")
            logger.warning("--%s %s has no effect without %s", flag, value, needs)


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
    for name, needs in NEEDS.items():
        default = MoEConfig.__dataclass_fields__[name].default
        if getattr(config, name) != default and not needs[0](config):
            logger.warning("%s has no effect without %s", label_of(name), needs[1])
    untrainable = config.gate_types == ["hash"] or config.choice == "experts"
    if untrainable and "gshard" in config.balance_loss:
        logger.info(
            "--moe-balance-loss %s is logged but trains nothing: a hash gate has no parameters, and under "
            "--moe-choice experts the load is even",
            config.balance_loss,
        )
    of_sides = [getattr(cfg, f"{side}_moe_freq", -1) for side in ("encoder", "decoder")]
    if -1 not in of_sides and cfg.moe_freq != defaults(ModelOptions)["moe_freq"]:
        logger.warning(
            "--moe-freq %s has no effect: --encoder-moe-freq and --decoder-moe-freq are given",
            cfg.moe_freq,
        )
    if getattr(cfg, "num_workers_valid", -1) >= 0:
        logger.info("--num-workers-valid is not used: validation loads by --num-workers processes")


def _counts(counts: list[int]) -> str:
    return "/".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))


def _evaluation_capacity(config: MoEConfig) -> str:
    fraction = config.eval_capacity_token_fraction
    if evaluates_as_in_training(config):
        return "as in training"
    return f"{fraction:g} of the tokens" if fraction else f"{config.eval_capacity_factor:g}"
