"""Check Tutel's arguments and convert them to the fields of a MoEConfig.

T tokens, E experts, K top_k, s ranks that hold one expert.
"""

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_tutel.moe.capacity import Capacity
from fairseq_tutel.moe.config import OVERLAP, TEMPERATURE, MoEConfig
from fairseq_tutel.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    CAPACITY,
    NOT_NEGATIVE,
    Rule,
    is_whole,
    require,
)
from fairseq_tutel.parallel import world
from fairseq_tutel.parallel.strategy import Strategy, degree_of

logger = logging.getLogger(__name__)

TRUE_OR_FALSE: Rule = (lambda v: v in (True, False), "give True or False")

CALL_RULES: dict[str, Rule] = {
    "top_k": AT_LEAST_1,
    "capacity_factor": CAPACITY,
    "megablocks_size": AT_LEAST_0,
    "inequivalent_tokens": TRUE_OR_FALSE,
}

# Tutel's key of a gate -> (field of MoEConfig, Tutel's default, rule).
COMMON: dict[str, tuple[str, Any, Rule]] = {
    "k": ("top_k", 1, AT_LEAST_1),
    "capacity_factor": ("capacity_factor", 1.0, CAPACITY),
    "gate_noise": ("gate_noise", 0.0, NOT_NEGATIVE),
}
TOP = {**COMMON, "fp32_gate": ("gate_fp32", False, TRUE_OR_FALSE)}
COSINE = {
    **TOP,
    "proj_dim": ("gate_projection_dim", 256, AT_LEAST_1),
    "init_t": ("gate_temperature", 0.5, TEMPERATURE),
}
GATES = {"top": ("linear", TOP), "cosine_top": ("cosine", COSINE)}

# Slots are rounded up to a multiple. Above LARGE, that multiple is a multiple of COARSE, as in Tutel.
LARGE, COARSE = 256, 128


def check(name: str, value: Any, rule: Rule) -> None:
    """Raise ValueError if an argument's value breaks its rule; the value may have any type."""
    try:
        holds = rule[0](value)
    except TypeError:
        holds = False
    require(holds, f"{name} is {value!r}; {rule[1]}.")


def check_switch(name: str, value: Any) -> bool:
    """Check a boolean argument and return it; 0 and 1 are allowed, as in Tutel."""
    check(name, value, TRUE_OR_FALSE)
    return bool(value)


def check_keys(what: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError if a dict has an unknown key."""
    for key in options:
        require(key in known, f"{what} has the unknown key {key!r}; choose from {', '.join(known)}.")


@functools.cache
def log_no_effect(name: str, value: Any) -> None:
    """Log that an argument has no effect, once for each value."""
    logger.warning("%s is %r, which has no effect; results are the same without it.", name, value)


def check_seeds(seeds: Any) -> tuple[int | None, int | None, int | None]:
    """Check the argument `seeds` and return its three seeds; None means that a seed was omitted.

    They initialize the gates, then the experts, then torch after the layer is built.
    """
    given = (None, None, None) if seeds is None else seeds
    fine = isinstance(given, tuple | list) and len(given) in (2, 3)
    require(
        fine and all(seed is None or AT_LEAST_0[0](seed) for seed in given),
        f"seeds is {seeds!r}; give (gate, experts, afterwards), each None or a whole number of at least 0.",
    )
    gate, experts, after = (*given, None)[:3]
    return gate, experts, after


def count_experts(per_device: Any, group: dist.ProcessGroup | None = None) -> int:
    """Return E, the number of experts on all ranks of a group, from `num_experts_per_device`.

    n > 0 means n experts on each rank; -n or 1/n means one expert on every n ranks; -1 equals 1. A group of
    None means all ranks.
    """
    per_rank = per_device
    if isinstance(per_device, float) and 0 < per_device < 1:
        shared_by = round(1 / per_device)
        if abs(per_device * shared_by - 1) < 0.02:  # 0.33 means 1/3
            per_rank = -shared_by
    require(
        is_whole(per_rank) and per_rank != 0,
        f"num_experts_per_device is {per_device!r}; give n experts on each rank, or -n or 1/n for one "
        "expert on every n ranks.",
    )
    require(
        group is None or isinstance(group, dist.ProcessGroup),
        f"group is {group!r}; give a process group that this rank is in, or None for all ranks.",
    )
    ranks = world.size(group)
    if per_rank > 0 or per_rank == -1:
        return abs(per_rank) * ranks
    require(
        ranks % -per_rank == 0,
        f"num_experts_per_device is {per_device}: one expert on every {-per_rank} ranks, but there are "
        f"{ranks} ranks; give a divisor of {ranks}.",
    )
    return ranks // -per_rank


def split_shape(x: Tensor, reserve_dims: int, model_dim: int) -> tuple[torch.Size, torch.Size]:
    """Split an input's shape into the dimensions of tokens and the dimensions of one token's features."""
    require(
        is_whole(reserve_dims) and 1 <= reserve_dims <= x.dim(),
        f"reserve_dims is {reserve_dims!r}, but the input has shape {tuple(x.shape)}; give a whole "
        f"number from 1 to {x.dim()}.",
    )
    outer, features = x.shape[:-reserve_dims], x.shape[-reserve_dims:]
    require(
        features.numel() == model_dim,
        f"the input has shape {tuple(x.shape)}, that is {features.numel()} features per token, but "
        f"model_dim is {model_dim}; give an input with last dimension {model_dim}, or set reserve_dims.",
    )
    return outer, features


def changed(
    strategy: Strategy,
    shared_by: int,
    slices: int,
    overlap: Any = None,
    adaptive_r: Any = None,
    parallel_type: Any = None,
) -> Strategy:
    """Return an execution strategy with another number of chunks or another r; None changes nothing.

    `overlap` is the number of chunks. As in Tutel, r is clamped to 0 … s, where s = `shared_by` ranks share
    an expert. `slices` is 1 if each of these ranks has the complete expert.
    """
    if overlap is not None:
        check("a2a_ffn_overlap_degree", overlap, OVERLAP)
        strategy = dataclasses.replace(strategy, overlap=overlap)
    name, value, degree = "adaptive_r", adaptive_r, adaptive_r
    if parallel_type is not None:
        name, value = "parallel_type", parallel_type
        degree = degree_of(parallel_type, shared_by) if isinstance(parallel_type, str) else None
        require(
            degree is not None,
            f"parallel_type is {parallel_type!r}; choose one of adaptive:r (r a whole number), data, "
            "model, auto.",
        )
    if degree is None:
        return strategy
    require(is_whole(degree), f"{name} is {value!r}; give a whole number, or None.")
    degree = min(max(degree, 0), shared_by)
    require(
        degree == 0 or shared_by % degree == 0,
        f"{name} is {value!r}, but {shared_by} ranks hold one expert; give 0 or a divisor of {shared_by}.",
    )
    if degree > slices:
        log_no_effect(name, value)
    return dataclasses.replace(strategy, adaptive_r=min(degree, slices))


def gate_dicts(gate_type: Any) -> list[Mapping[str, Any]]:
    """Return a list with one dict per gate, from a dict or a list of dicts."""
    gates = list(gate_type) if isinstance(gate_type, list | tuple) else [gate_type]
    for gate in gates:
        require(
            isinstance(gate, Mapping) and gate.get("type") in (*GATES, "custom"),
            f"gate_type is {gate_type!r}; give a dict or a list of dicts, each with a type of "
            f"{', '.join(GATES)} or custom, such as {{'type': 'top', 'k': 2}}.",
        )
    require(bool(gates), "gate_type is an empty list; give at least one gate.")
    return gates


def gate_fields(gate: Mapping[str, Any], num_experts: int, module: nn.Module | None) -> dict[str, Any]:
    """Return the MoEConfig fields that a gate's dict sets; k is at most E, as in Tutel.

    `top_k`, `capacity_factor` and `gate_noise` of a custom gate's module override the dict's.
    """
    kind, known = GATES.get(gate["type"], ("linear", COMMON))
    values = {key: gate.get(key, default) for key, (_, default, _) in known.items()}
    if module is None:
        check_keys(f"gate_type {gate['type']!r}", gate, ("type", *known))
    else:
        values["k"] = getattr(module, "top_k", gate.get("top_k", values["k"]))
        for key in ("capacity_factor", "gate_noise"):
            values[key] = getattr(module, key, values[key])
    for key, value in values.items():
        check(f"gate_type's {key}", value, known[key][2])
        if known[key][2] is TRUE_OR_FALSE:  # 0 and 1 are allowed
            values[key] = bool(value)
    fields = {known[key][0]: value for key, value in values.items()}
    factor = fields["capacity_factor"]
    top_k = min(fields["top_k"], num_experts)
    return {**fields, "gate_type": kind, "top_k": top_k, "eval_capacity_factor": factor}


def show_fields(gate: nn.Module, config: MoEConfig) -> None:
    """Copy options such as top_k to attributes of a gate, unless the gate already has them."""
    for name, _, _ in COMMON.values():
        if not hasattr(gate, name):
            setattr(gate, name, getattr(config, name))


def set_fields(gate: nn.Module, index: int, config: MoEConfig) -> dict[str, Any]:
    """Return the MoEConfig fields that are attributes of a gate, with their current values."""
    fields = {}
    for name, _, rule in COMMON.values():
        fields[name] = getattr(gate, name)
        if fields[name] != getattr(config, name):
            check(f"gates[{index}].{name}", fields[name], rule)
    fields["top_k"] = min(fields["top_k"], config.num_experts)
    return {**fields, "eval_capacity_factor": fields["capacity_factor"]}


def custom_gate(gate: Mapping[str, Any], model_dim: int, num_experts: int) -> nn.Module | None:
    """Build the module of a custom gate, or return None for a built-in gate.

    The module's class gets model_dim, num_global_experts and the remaining keys of the dict.
    """
    if gate["type"] != "custom":
        return None
    require(
        callable(gate.get("module")),
        f"gate_type's module is {gate.get('module')!r}; give the class of a custom gate.",
    )
    rest = {key: value for key, value in gate.items() if key not in ("type", "module")}
    module = gate["module"](model_dim=model_dim, num_global_experts=num_experts, **rest)
    require(
        isinstance(module, nn.Module),
        f"gate_type's module built {type(module).__name__}; give the class of a torch module.",
    )
    return module


def check_noise(index: int, fields: Mapping[str, Any]) -> None:
    """Raise ValueError if a gate's MoEConfig fields select the load loss without gate noise."""
    require(
        fields["balance_loss"] == "gshard" or fields["gate_noise"] > 0,
        f"is_gshard_loss is False, but gate {index} has no gate_noise, which the load loss needs; set "
        "gate_noise, for example to 1.0.",
    )


def tutel_capacity(factor: float, top_k: int, num_experts: int, num_tokens: int, multiple: int) -> Capacity:
    """Return Tutel's capacity, K * int(|factor| * ceil(T / E)) slots rounded up to a multiple.

    If the factor is 0, there is no limit.
    """
    if factor == 0:
        return Capacity()
    slots = top_k * int(abs(factor) * -(-num_tokens // num_experts))
    require(
        slots > 0 or num_tokens == 0,
        f"capacity_factor is {factor!r}, which with tutel_capacity gives 0 slots for {num_tokens} tokens "
        f"on {num_experts} experts; give a larger factor, or omit tutel_capacity.",
    )
    if multiple > LARGE:
        multiple = -(-multiple // COARSE) * COARSE
    return Capacity(fixed=-(-slots // multiple) * multiple)
