"""Optimizer states whose experts are apart, and together: as the moments of [E, …] parameters.

An optimizer numbers its parameters in the order of the model; a state dict has them by number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
# Where a parameter of ours is elsewhere: (file, name), or one such pair for every expert.
Source = list[tuple[int, str]]
SHARED = -1  # the file of what is no expert's

BUFFERS = ("version", "_float_tensor")
TIED = ("embed_tokens", "output_projection", "adaptive_softmax")


class InexactError(Exception):
    """An optimizer state cannot be converted without a change; the text says why."""


def trained(names: Sequence[str], weight: Callable[[str], Tensor]) -> list[str]:
    """Return the names of parameters, each once, in the order of an optimizer.

    Args:
        names: of a model's tensors, in its order.
        weight: returns one of them; tied ones are equal.
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
    """Return the group of a state that has just one, of `count` parameters.

    Raises:
        InexactError: another number of groups or of parameters.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != 1 or "param_id_map" in state:
        raise InexactError("it is of a sharded training, or has several groups of parameters")
    if list(groups[0]["params"]) != list(range(count)):
        raise InexactError(
            f"it is of {len(groups[0]['params'])} tensors where the model has {count}"
        )
    return groups[0]


def checked(state: State, shape: torch.Size) -> State:
    """Return the state of one parameter.

    Raises:
        InexactError: a tensor that is neither one number nor of the parameter's shape.
    """
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim() > 0 and value.shape != shape:
            raise InexactError(
                f"{key} has the shape {tuple(value.shape)} where its parameter has {tuple(shape)}"
            )
    return state


def stacked(states: Sequence[State], shape: torch.Size) -> State:
    """Return the state of a parameter [E, …] from those of E experts, whose parameters have a shape.

    Raises:
        InexactError: they do not fit together.
    """
    together: State = {}
    if any(state.keys() != states[0].keys() for state in states):
        raise InexactError("it has moments for some experts alone")
    for key in states[0]:
        values = [checked(state, shape)[key] for state in states]
        if torch.is_tensor(values[0]) and values[0].shape == shape:
            together[key] = torch.stack(values)
        elif key.endswith("_scale"):  # of moments in fp16: one for each expert
            scales = torch.stack([torch.as_tensor(value).reshape(()) for value in values])
            together[key] = scales.view(-1, *[1] * len(shape))
        elif all(_same(value, values[0]) for value in values):
            together[key] = values[0]
        else:
            raise InexactError(f"its {key} differs between experts")
    return together


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if torch.is_tensor(a) and torch.is_tensor(b) else a is b or a == b


def apart(state: State, expert: int, shape: torch.Size) -> State:
    """Return the state of one expert from that of a parameter of a shape [E, …]; its tensors are copies."""
    own: State = {}
    for key, value in state.items():
        if torch.is_tensor(value) and value.shape == shape:
            own[key] = value[expert].clone()
        elif torch.is_tensor(value) and value.dim() > 0:
            own[key] = value[expert].reshape(()).clone()
        else:
            own[key] = value
    return own
