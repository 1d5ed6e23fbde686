"""Explains in one sentence why a checkpoint does not fit the model that loads it."""

import logging
import sys
from typing import Any

from torch import nn

from fairseq_tutel.plugin.feed_forward import MoEFeedForward

logger = logging.getLogger(__name__)


def end_where_it_differs(model: nn.Module, state_dict: Any, prefix: str = "", *_: Any) -> None:
    """Exit if training loads a checkpoint of a different model; the error names the difference."""
    state = _without(prefix, state_dict)
    difference = _difference_of_experts(model, state) or _difference(model, state)
    if difference:
        sys.exit(f"error: {difference}")


def log_difference(model: nn.Module, state_dict: Any, prefix: str = "", *_: Any) -> None:
    """Log an error if a checkpoint's expert tensors differ from the model's; loading continues."""
    difference = _difference_of_experts(model, _without(prefix, state_dict))
    if difference:
        logger.error(difference)


def _without(prefix: str, state_dict: Any) -> Any:
    return {key.removeprefix(prefix): state_dict[key] for key in state_dict if key.startswith(prefix)}


def _difference_of_experts(model: nn.Module, state_dict: Any) -> str | None:
    """Return a message that names missing and unexpected expert tensors, and the fix; None if all match.

    Shapes are not compared, because the experts check them when they are loaded.
    """
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, MoEFeedForward):
            continue
        needed = {f"{layer_name}.experts.{name}" for name in layer.experts.expert_parameters()}
        if not needed & state_dict.keys():
            return (
                f"the checkpoint has no experts in {layer_name}, but this model has experts in that layer; "
                "give the --moe-freq of the run that saved the checkpoint, or, if the checkpoint is dense, "
                "the output of `fairseq-tutel convert upcycle`"
            )
        own = {f"{layer_name}.{key}" for key in layer.state_dict() if "balance_bias" not in key}
        saved = {key for key in state_dict if key.startswith(f"{layer_name}.")}
        saved -= {f"{layer_name}.balance_bias.bias"} if layer.balance_bias is not None else set()
        if own != saved:
            return (
                f"the checkpoint lacks the tensors {sorted(own - saved) or 'nothing'} and has the extra "
                f"tensors {sorted(saved - own) or 'nothing'}; give the --moe-expert-type, --moe-gate-type, "
                "--moe-balance-bias, --moe-shared-experts, --moe-residual and --moe-cmr of the run that "
                "saved it"
            )
    return None


def _difference(model: nn.Module, state_dict: Any) -> str | None:
    """Return a message that says how a checkpoint's dense tensors differ from a model's; None if equal."""
    modules = model.named_modules(remove_duplicate=False)  # language pairs share layers
    layers = tuple(f"{name}." for name, module in modules if isinstance(module, MoEFeedForward))
    own, saved = (
        {key: tuple(value.shape) for key, value in state.items() if not key.startswith(layers)}
        for state in (model.state_dict(), state_dict)
    )
    for key in own.keys() & saved.keys():
        if own[key] != saved[key]:
            return (
                f"the checkpoint's {key} has the shape {saved[key]}, but this model's has {own[key]}; give "
                "the --arch, sizes and data (its dictionaries or classes matter) of the run that saved it"
            )
    # Extra keys alone are accepted: an older file may have keys that fairseq drops.
    if own.keys() - saved.keys():
        return (
            f"the checkpoint lacks the tensors {sorted(own.keys() - saved.keys())[:3]} and has the extra "
            f"tensors {sorted(saved.keys() - own.keys())[:3] or 'nothing'}; give the --arch and options of "
            "the run that saved it"
        )
    return None
