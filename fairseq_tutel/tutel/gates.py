"""Gates in Tutel's form: a dict, or several, -> the options of a MoEConfig, and perhaps a module."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from fairseq_tutel.moe.config import TEMPERATURE, MoEConfig
from fairseq_tutel.moe.options import AT_LEAST_1, CAPACITY, NOT_NEGATIVE, Rule
from fairseq_tutel.tutel.arguments import TRUE_OR_FALSE, check, check_keys, logger, require

# Tutel's key -> (field of MoEConfig, Tutel's default, rule).
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
BUILT_IN = {"top": ("linear", TOP), "cosine_top": ("cosine", COSINE)}


def gate_dicts(gate_type: Any) -> list[Mapping[str, Any]]:
    """Return one dict per gate from a dict, a list of them, or the deprecated 'Top2Gate'."""
    if isinstance(gate_type, str):
        found = re.fullmatch(r"Top([0-9]+)Gate", gate_type)
        if found is not None:
            gate = {"type": "top", "k": int(found[1])}
            logger.warning("gate_type %r is deprecated; give %r.", gate_type, gate)
            return [gate]
    gates = list(gate_type) if isinstance(gate_type, list | tuple) else [gate_type]
    for gate in gates:
        require(
            isinstance(gate, Mapping) and gate.get("type") in (*BUILT_IN, "custom"),
            f"gate_type is {gate_type!r}; give a dict, or a list of them, each with a type of "
            f"{', '.join(BUILT_IN)} or custom, such as {{'type': 'top', 'k': 2}}.",
        )
    require(bool(gates), "gate_type is an empty list; give at least one gate.")
    return gates


def gate_fields(
    gate: Mapping[str, Any], num_experts: int, module: nn.Module | None
) -> dict[str, Any]:
    """Return the fields of MoEConfig that a gate decides.

    Args:
        gate: its dict.
        num_experts: E; a larger k is taken for E, as Tutel does.
        module: of a custom gate: its `top_k`, `capacity_factor` and `gate_noise` come before the dict's.

    Raises:
        ValueError: an unknown key, or a value that is not allowed.
    """
    kind, known = BUILT_IN.get(gate["type"], ("linear", COMMON))
    values = {key: gate.get(key, default) for key, (_, default, _) in known.items()}
    if module is None:
        check_keys(f"gate_type {gate['type']!r}", gate, ("type", *known))
    else:
        values["k"] = getattr(module, "top_k", gate.get("top_k", values["k"]))
        for key in ("capacity_factor", "gate_noise"):
            values[key] = getattr(module, key, values[key])
    for key, value in values.items():
        check(f"gate_type's {key}", value, known[key][2])
        if known[key][2] is TRUE_OR_FALSE:  # 0 and 1 are, too
            values[key] = bool(value)
    fields = {known[key][0]: value for key, value in values.items()}
    factor = fields["capacity_factor"]
    top_k = min(fields["top_k"], num_experts)
    return {**fields, "gate_type": kind, "top_k": top_k, "eval_capacity_factor": factor}


def show_fields(gate: nn.Module, config: MoEConfig) -> None:
    """Give a gate the attributes that `set_fields` reads, where it has none."""
    for name, _, _ in COMMON.values():
        if not hasattr(gate, name):
            setattr(gate, name, getattr(config, name))


def set_fields(gate: nn.Module, index: int, config: MoEConfig) -> dict[str, Any]:
    """Return the fields of MoEConfig that stand on a gate as attributes, as they are now.

    Raises:
        ValueError: a value that is not allowed.
    """
    fields = {}
    for name, _, rule in COMMON.values():
        fields[name] = getattr(gate, name)
        if fields[name] != getattr(config, name):
            check(f"gates[{index}].{name}", fields[name], rule)
    fields["top_k"] = min(fields["top_k"], config.num_experts)
    return {**fields, "eval_capacity_factor": fields["capacity_factor"]}


def custom_gate(gate: Mapping[str, Any], model_dim: int, num_experts: int) -> nn.Module | None:
    """Build module=cls(model_dim, num_global_experts, **rest) of a custom gate; None for another.

    Raises:
        ValueError: there is no class, or it gives no torch module.
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
        f"gate_type's module gave {type(module).__name__}; give the class of a torch module.",
    )
    return module
