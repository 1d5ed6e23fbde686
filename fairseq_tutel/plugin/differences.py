"""Where a checkpoint is another model's than the one that loads it: one sentence that says in what."""

import logging
import sys
from typing import Any, NoReturn

from torch import nn

from fairseq_tutel.plugin.feed_forward import MoEFeedForward

logger = logging.getLogger(__name__)


def end(error: ValueError) -> NoReturn:
    """End a training whose checkpoint cannot be read: stock would say that architectures do not match."""
    sys.exit(f"error: {error}")


def end_where_it_differs(model: nn.Module, state_dict: Any, prefix: str = "", *_: Any) -> None:
    """End a training whose checkpoint is another model's: stock's own error does not say which."""
    own = _below(state_dict, prefix)
    difference = _difference_of_experts(model, own) or _difference(model, own)
    if difference:
        end(ValueError(difference))


def say_what_differs(model: nn.Module, state_dict: Any, prefix: str = "", *_: Any) -> None:
    """Log one sentence when a checkpoint has other experts; who opens it may ask for that."""
    difference = _difference_of_experts(model, _below(state_dict, prefix))
    if difference:
        logger.error(difference)


def _below(state_dict: Any, prefix: str) -> Any:
    """Return the part of a model that is one of several, by its own names."""
    if not prefix:
        return state_dict
    return {
        key.removeprefix(prefix): state_dict[key] for key in state_dict if key.startswith(prefix)
    }


def _difference_of_experts(model: nn.Module, state_dict: Any) -> str | None:
    """Return what the experts of a checkpoint have or lack, and the fix; shapes are theirs to refuse."""
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, MoEFeedForward):
            continue
        needed = {f"{layer_name}.experts.{name}" for name in layer.experts.expert_parameters()}
        if not needed & state_dict.keys():
            return (
                f"the checkpoint has no experts in {layer_name} where this model has them; give the "
                "--moe-freq it was saved with, or of a dense model what `python -m fairseq_tutel convert "
                "upcycle` makes of it"
            )
        if needed - state_dict.keys():
            missing = sorted(needed - state_dict.keys())
            return f"the checkpoint lacks {missing}; give the --moe-expert-type it was saved with"
        own = {f"{layer_name}.{key}" for key in layer.state_dict() if "balance_bias" not in key}
        saved = {key for key in state_dict if key.startswith(f"{layer_name}.")}
        saved -= {f"{layer_name}.balance_bias.bias"} if layer.balance_bias is not None else set()
        if own != saved:
            return (
                f"the checkpoint lacks {sorted(own - saved) or 'nothing'} and has "
                f"{sorted(saved - own) or 'nothing'} too many; give the --moe-gate-type, "
                "--moe-balance-bias, --moe-shared-experts and --moe-residual it was saved with"
            )
    return None


def _difference(model: nn.Module, state_dict: Any) -> str | None:
    """Return what a checkpoint has otherwise than a model beside its experts, and the fix."""
    modules = model.named_modules(remove_duplicate=False)  # pairs of languages share layers
    layers = tuple(f"{name}." for name, module in modules if isinstance(module, MoEFeedForward))
    own, saved = (
        {key: tuple(value.shape) for key, value in state.items() if not key.startswith(layers)}
        for state in (model.state_dict(), state_dict)
    )
    for key in own.keys() & saved.keys():
        if own[key] != saved[key]:
            return (
                f"the checkpoint's {key} is {saved[key]} where this model's is {own[key]}; give the data, "
                "whose dictionaries or classes count, and the --arch and sizes it was saved with"
            )
    # What is too many alone may be an older file's, which stock drops.
    if own.keys() - saved.keys():
        return (
            f"the checkpoint lacks {sorted(own.keys() - saved.keys())[:3]} and has "
            f"{sorted(saved.keys() - own.keys())[:3] or 'nothing'} too many; give the --arch and options "
            "it was saved with"
        )
    return None
