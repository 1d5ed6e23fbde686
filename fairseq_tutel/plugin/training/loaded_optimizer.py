"""Checks that a loaded optimizer state fits the parameters; torch does not check shapes."""

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from fairseq_tutel.files.small import shown
from fairseq_tutel.optim.moe_optimizer import innermost_optimizer

# State tensors of the shape of their parameter, in fairseq's optimizers.
SHAPED = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf",
    "momentum_buffer", "sum", "square_avg", "acc_delta",
)  # fmt: skip
LARGEST = 1e300  # whole numbers beyond are not floats
# Options that fairseq's optimizers read; torch adds others to `defaults` that groups may lack.
READ = ("betas", "eps", "weight_decay", "amsgrad")


def optimizers_of(trainer: Any) -> Iterator[Any]:
    """Yield torch's optimizers of a trainer; a composite optimizer has one for each parameter group."""
    inner = innermost_optimizer(trainer.optimizer)
    for part in getattr(inner.optimizer, "optimizers", {"": inner}).values():
        yield part.optimizer


def mismatch(trainer: Any) -> str | None:
    """Return the first option or state of the optimizers that does not fit; None if all fit."""
    for optimizer in optimizers_of(trainer):
        for parameter, state in optimizer.state.items():
            if not torch.is_tensor(parameter):
                return f"the optimizer's state of the unknown parameter {shown(parameter)}"
            for key in SHAPED if isinstance(state, Mapping) else ():
                # SGD without momentum has None there.
                if state.get(key) is not None and not _has_form(state[key], parameter):
                    return f"the optimizer's {key} of a parameter {tuple(parameter.shape)}"
        for group in optimizer.param_groups:
            for key, default in optimizer.defaults.items():
                if key not in group and key in READ:
                    return f"the optimizer's missing {key}"
                if key in group and key != "lr" and not _is_like(group[key], default, key):
                    return f"the optimizer's {key} {shown(group[key])}"
            states = [optimizer.state[p] for p in group["params"] if p in optimizer.state]
            if group.get("amsgrad") and any("max_exp_avg_sq" not in state for state in states):
                return "the optimizer's amsgrad True"
    return None


def _is_like(value: Any, default: Any, key: str) -> bool:
    """Whether an option's value has the type and range of its default."""
    if isinstance(default, bool):
        return value is None or (isinstance(value, bool) and (key != "maximize" or not value))
    if isinstance(default, tuple | list):
        is_list = isinstance(value, tuple | list) and len(value) == len(default)
        most = 1 if key == "betas" else math.inf
        return is_list and all(_is_number(each, most=most) for each in value)
    if isinstance(default, int | float):
        return _is_number(value, least=0 if default >= 0 else -math.inf)
    return default is None or isinstance(value, type(default))


def _is_number(value: Any, least: float = 0, most: float = math.inf) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and bool(least <= value < min(most, LARGEST))


def _has_form(value: Any, parameter: torch.Tensor) -> bool:
    return (
        torch.is_tensor(value)
        and value.layout == torch.strided
        and value.is_floating_point()
        and value.shape == parameter.shape
    )
