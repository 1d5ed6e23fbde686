"""One sentence for a checkpoint that does not fit the model that loads it."""

import logging
import sys
from typing import Any

from torch import nn

from fairseq_tutel.plugin.feed_forward import MoEFeedForward

logger = logging.getLogger(__name__)


def end_where_it_differs(model: nn.Module, state_dict: Any, prefix: str = "", *_: Any) -> None:
    """Exit training whose checkpoint is of another model; fairseq does not name the difference."""
    state = _without(prefix, state_dict)
    difference = _difference_of_experts(model, state) or _difference(model, state)
    if difference:
        sys.exit(f"error: {difference}")


def log_difference(model: nn.Module, state_dict: Any, prefix: str = "", *_: Any) -> None:
    """Log one sentence if a checkpoint has other experts; loading it for use may be intended."""
    difference = _difference_of_experts(model, _without(prefix, state_dict))
    if difference:
        logger.error(difference)


def _without(prefix: str, state_dict: Any) -> Any:
    return {key.removeprefix(prefix): state_dict[key] for key in state_dict if key.startswith(prefix)}


def _difference_of_experts(model: nn.Module, state_dict: Any) -> str | None:
    """Return which expert tensors a checkpoint lacks or adds, and the fix; experts check shapes."""
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, MoEFeedForward):
            continue
        needed = {f"{layer_name}.experts.{name}" for name in layer.experts.expert_parameters()}
        if not needed & state_dict.keys():
            return (
                f"the checkpoint has no experts in {layer_name} where this model has them; give the "
                "--moe-freq it was saved with, or for a dense model the output of `python -m fairseq_tutel "
                "convert upcycle`"
            )
        own = {f"{layer_name}.{key}" for key in layer.state_dict() if "balance_bias" not in key}
        saved = {key for key in state_dict if key.startswith(f"{layer_name}.")}
        saved -= {f"{layer_name}.balance_bias.bias"} if layer.balance_bias is not None else set()
        if own != saved:
            return (
                f"the checkpoint lacks {sorted(own - saved) or 'nothing'} and has "
                f"{sorted(saved - own) or 'nothing'} too many; give the --moe-expert-type, "
                "--moe-gate-type, --moe-balance-bias, --moe-shared-experts and --moe-residual it was "
                "saved with"
            )
    return None


def _difference(model: nn.Module, state_dict: Any) -> str | None:
    """Return how a checkpoint differs from a model outside of its experts, and the fix."""
    modules = model.named_modules(remove_duplicate=False)  # language pairs share layers
    layers = tuple(f"{name}." for name, module in modules if isinstance(module, MoEFeedForward))
    own, saved = (
        {key: tuple(value.shape) for key, value in state.items() if not key.startswith(layers)}
        for state in (model.state_dict(), state_dict)
    )
    for key in own.keys() & saved.keys():
        if own[key] != saved[key]:
            return (
                f"the checkpoint's {key} is {saved[key]} where this model's is {own[key]}; give the data "
                "(its dictionaries or classes decide), --arch and sizes it was saved with"
            )
    # Extra keys alone may be an older file's, which fairseq drops.
    if own.keys() - saved.keys():
        return (
            f"the checkpoint lacks {sorted(own.keys() - saved.keys())[:3]} and has "
            f"{sorted(saved.keys() - own.keys())[:3] or 'nothing'} too many; give the --arch and options "
            "it was saved with"
        )
    return None
