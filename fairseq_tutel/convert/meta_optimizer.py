"""Joins the optimizer states of Meta's files, which are by parameter number, into one of [E, …] stacks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
BUFFERS = ("version", "_float_tensor")
TIED = ("embed_tokens", "output_projection", "adaptive_softmax")


class InexactError(Exception):
    """An optimizer state cannot be converted without a change; the text is the reason."""


def trained(names: Sequence[str], weight: Callable[[str], Tensor]) -> list[str]:
    """Return the names of parameters in the order of an optimizer; tied ones appear once.

    Args:
        names: a model's tensors, in its order.
        weight: returns a tensor by name; those of tied parameters are equal.
    """
    kept: list[str] = []
    for name in names:
        if name.endswith(BUFFERS):
            continue
        may_be_tied = any(part in name for part in TIED)
        if may_be_tied and any(
            any(part in other for part in TIED) and torch.equal(weight(other), weight(name))
            for other in kept
        ):
            continue
        kept.append(name)
    return kept


def one_group(state: State, count: int) -> State:
    """Return the only parameter group of an optimizer of `count` parameters.

    Raises:
        InexactError: there is another number of groups or of parameters.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != 1 or "param_id_map" in state:
        raise InexactError("it is from a sharded training run, or has several parameter groups")
    if list(groups[0]["params"]) != list(range(count)):
        raise InexactError(f"it has {len(groups[0]['params'])} tensors, but the model has {count}")
    return groups[0]


def checked(state: State, shape: torch.Size) -> State:
    """Return the state of one parameter.

    Raises:
        InexactError: a tensor is neither a scalar nor of the parameter's shape.
    """
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() > 0 and value.shape != shape:
            raise InexactError(
                f"{key} has the shape {tuple(value.shape)}, but its parameter has {tuple(shape)}"
            )
    return state


def stacked(states: Sequence[State], shape: torch.Size) -> State:
    """Return the state of a stack [E, …] from those of E experts with parameters of a shape.

    Raises:
        InexactError: they differ in more than moments.
    """
    together: State = {}
    if any(state.keys() != states[0].keys() for state in states):
        raise InexactError("only some experts have moments")
    for key in states[0]:
        values = [checked(state, shape)[key] for state in states]
        if torch.is_tensor(values[0]) and values[0].shape == shape:
            together[key] = torch.stack(values)
        elif key.endswith("_scale"):  # of moments in fp16: one per expert
            scales = torch.stack([torch.as_tensor(value).reshape(()) for value in values])
            together[key] = scales.view(-1, *[1] * len(shape))
        elif all(_same(value, values[0]) for value in values):
            together[key] = values[0]
        else:
            raise InexactError(f"its {key} differs between experts")
    return together


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a is b or a == b
