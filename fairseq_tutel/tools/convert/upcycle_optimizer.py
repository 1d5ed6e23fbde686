"""The optimizer state of an upcycled model: the dense moments, an expert's those of its dense step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.tools.convert.layers import Layer, dense_step
from fairseq_tutel.tools.convert.optimizer_state import InexactError, checked, one_group, trained
from fairseq_tutel.tools.convert.upcycle_layer import copies, trained_tensors
from fairseq_tutel.zero.state import MASTER

FIX = "leave --copy-optimizer-state out"


def copied_state(
    dense: Mapping[str, Tensor],
    optimizer: Any,
    moe: Mapping[str, Tensor],
    layers: Mapping[Layer, MoEConfig],
) -> dict[str, Any]:
    """Return an optimizer's state for a MoE model that was made of a dense one.

    What is new, such as gates, has none: optimizers begin it at their first step.

    Args:
        dense: the dense model's state dict.
        optimizer: the state dict of its optimizer, None where there is none.
        moe: the MoE model's state dict.
        layers: those that became MoE layers, with their configurations.

    Raises:
        ValueError: a state that is not by parameter, in the model's order.
    """
    if not isinstance(optimizer, dict) or "state" not in optimizer:
        raise ValueError(f"--input holds no optimizer state; {FIX}.")
    names = trained(list(dense), dense.__getitem__)
    try:
        group = one_group(optimizer, len(names))
        by_name = {
            name: checked(optimizer["state"].get(i, {}), dense[name].shape)
            for i, name in enumerate(names)
        }
    except InexactError as reason:
        raise ValueError(
            f"--input holds an optimizer state that cannot be copied to experts: {reason}; {FIX}."
        ) from None
    for layer, config in layers.items():
        by_name |= _of_layer(dense, by_name, layer, config)
    new_names = _trained(moe, layers)
    return {
        **optimizer,
        "state": {i: by_name[name] for i, name in enumerate(new_names) if by_name.get(name)},
        "param_groups": [{**group, "params": list(range(len(new_names)))}],
    }


def _of_layer(
    dense: Mapping[str, Tensor],
    by_name: Mapping[str, dict[str, Any]],
    layer: Layer,
    config: MoEConfig,
) -> dict[str, dict[str, Any]]:
    """Return the state of a MoE layer's copied tensors by their names."""
    made: dict[str, dict[str, Any]] = {}
    for source, weight in dense_step(dense, layer).items():
        for key, value in by_name[f"{layer.name}.{source}"].items():
            if key == MASTER:  # a weight, and the copies of it may have noise
                continue
            # A step count, and what else is one number for a weight, is that of all its copies.
            is_moment = torch.is_tensor(value) and value.shape == weight.shape
            copied = copies({source: value if is_moment else weight.to("meta")}, config)
            for name, moment in copied.items():
                state = made.setdefault(f"{layer.step}.{name}", {})
                state[key] = moment if is_moment else value
    return made


def _trained(model: Mapping[str, Tensor], layers: Mapping[Layer, MoEConfig]) -> list[str]:
    """Return the names of a MoE model's trained parameters in their order."""
    of_layers = {
        layer.step: {f"{layer.step}.{key}" for key in trained_tensors(config, layer.step)}
        for layer, config in layers.items()
    }
    steps = tuple(f"{step}." for step in of_layers)
    return [
        name
        for name in trained(list(model), model.__getitem__)
        if not name.startswith(steps) or any(name in own for own in of_layers.values())
    ]
