"""This module lists valid values of MoE layer options, for tests of every value of every option.

The values come from the table of options, so tests automatically cover new switches and new options with
choices. A new way to choose experts also needs a line in `WAYS_TO_CHOOSE`. Other new options may need a
line in `VALUES` or `NEEDED`.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from fairseq_tutel import MoEConfig, MoELayer
from fairseq_tutel.moe.config import GATE_TYPES, LAYER

E = 4
# Tests try these numbers for an option without choices. The function `mixed` uses the first valid number.
NUMBERS = (0.5, 1, 2, 3, 0.01, 0.3, -0.5, -1)
VALUES: dict[str, tuple] = {
    "activation": ("gelu",), "a2a_algorithm": ("2dh",), "balance_loss": ("none",),
    "expert_type": ("glu",), "gate_type": GATE_TYPES, "parallel_type": ("model",),
    "top_k": (3, 1, 4), "gate_projection_dim": (3, 1), "gate_index": (1,),
}  # fmt: skip
COSINE, LIMITED = {"gate_type": "cosine"}, {"capacity_factor": 0.5}
# An option of this table has no effect or raises an error without the options that stand beside it.
NEEDED: dict[str, dict[str, Any]] = {
    "gate_index": {"gate_type": "linear,cosine"}, "gate_projection_dim": COSINE, "gate_temperature": COSINE,
    "groups_per_token": {"expert_groups": 4}, "cmr_gate_drop": {"cmr": True},
    "drop_policy": LIMITED, "min_capacity": LIMITED, "capacity_multiple": LIMITED,
}  # fmt: skip
# These options change how tokens choose experts in training.
WAYS_TO_CHOOSE: tuple[dict[str, Any], ...] = (
    {"rsample": True},
    {"second_expert_policy": "sampling"},
    {"second_expert_policy": "random"},
    {"rsample": True, "second_expert_policy": "random"},
)
# These options affect the experts, the weights and the slots of a token.
ROUTING = [item.name for item in LAYER.values() if item.theme in ("Routing", "Capacity")] + ["balance_bias"]


def config_of(settings: dict[str, Any], dim: int = 1) -> MoEConfig:
    """Return the configuration of a layer of 4 experts with these options, or raise ValueError."""
    return MoEConfig(**{"model_dim": dim, "hidden_dim": dim, "num_experts": E, **settings})


def settings_of(name: str) -> list[dict[str, Any]]:
    """Return valid settings of an option except the default, with other options that a setting needs."""
    item = LAYER[name]
    values = (True, False) if item.type is bool else item.choices or VALUES.get(name, NUMBERS)
    found = [{**NEEDED.get(name, {}), name: item.type(value)} for value in values]
    return [settings for settings in found if settings[name] != item.default and _is_valid(settings)]


def mixed(names: Iterable[str]) -> list[dict[str, Any]]:
    """Combine settings of options: every choice of every option, and one value of each numeric option.

    Each setting joins the smallest combination that accepts the setting, or begins a new combination.
    """
    cases: list[dict[str, Any]] = []
    for name in names:
        is_number = LAYER[name].type in (int, float)
        for settings in settings_of(name)[: 1 if is_number else None]:
            for case in sorted(cases, key=len):
                agrees = all(settings.get(key, value) == value for key, value in case.items())
                if agrees and _is_valid({**case, **settings}):
                    case.update(settings)
                    break
            else:
                cases.append(settings)
    return cases


def draws(settings: dict[str, Any]) -> bool:
    """Return whether a layer with these options draws random numbers in training."""
    layer = MoELayer(config_of({**LIMITED, **settings}, dim=6), seed=1)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        layer(x)
        return not torch.equal(torch.get_rng_state(), before)


def _is_valid(settings: dict[str, Any]) -> bool:
    with contextlib.suppress(ValueError):
        return bool(config_of(settings))
    return False
