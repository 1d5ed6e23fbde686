"""Freezes the parameters that --moe-train-only does not name."""

import fnmatch
import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.option import read
from fairseq_tutel.plugin.training.options import TaskConfig
from fairseq_tutel.plugin.training.tuning import option

logger = logging.getLogger(__name__)

# Prefixes of the names of a MoE layer's gate parameters.
GATES = ("gate.", "other_gates.", "beside.mix.", "beside.cmr_gate.")


def freeze(root: Any, model: nn.Module) -> None:
    """Freeze all parameters that --moe-train-only in the FairseqConfig `root` does not name.

    A frozen parameter has no gradient, no optimizer state and no all-reduce. The experts of a layer are
    stacked in one parameter, so zeros in the gradient freeze single experts.

    Raises:
        ValueError: a name or expert number fits no parameter, or weight decay would change frozen experts.
    """
    text = read(TaskConfig, root.task).moe_train_only
    if not text:
        return
    parts = _parts_of(model)
    of_names = dict(model.named_parameters(remove_duplicate=False))
    stacks = [module for module in model.modules() if isinstance(module, ExpertStack)]
    trained: set[nn.Parameter] = set()
    stacked: set[nn.Parameter] = set()  # parameters of which only some experts are trained
    numbers: set[int] = set()
    for name in text.split(","):
        number = name.removeprefix("expert:")
        if number.isdigit():  # "expert:3,7" names experts 3 and 7.
            numbers.add(int(number))
            having = [stack for stack in stacks if int(number) < stack.config.num_experts]
            found = {each for stack in having for each in stack.expert_parameters().values()}
            stacked |= found
        else:
            found = parts.get(name) or {of_names[each] for each in fnmatch.filter(of_names, name)}
            trained |= found
        if not found:
            raise ValueError(
                f"--moe-train-only has {name!r}, which names no parameter of this model; give "
                f"{', '.join(parts)}, expert:NUMBERS, or a pattern such as decoder.layers.0.*."
            )
    stacked -= trained
    if stacked and (decay := option(root.optimizer, "weight_decay")):
        raise ValueError(
            f"--weight-decay is {decay}, which would change the experts that --moe-train-only freezes; "
            "set it to 0."
        )
    for stack in stacks:
        frozen = [i for i in range(stack.num_local) if stack.first + i not in numbers]
        for parameter in stacked.intersection(stack.expert_parameters().values()):
            parameter.register_hook(functools.partial(_without, frozen))
    for parameter in set(of_names.values()) - trained - stacked:
        parameter.requires_grad_(False)
    for module in model.modules():
        # fairseq recomputes a layer without gradients if the layer's input needs no gradient.
        if hasattr(module, "precheckpoint_forward") and any(p.requires_grad for p in module.parameters()):
            module.register_forward_pre_hook(_with_gradient)
    count, every = (sum(each.numel() for each in part) for part in (trained, model.parameters()))
    logger.info(
        "--moe-train-only %s: this rank trains %d of %d parameters, and some experts of %d stacks",
        *(text, count, every, len(stacked)),
    )


def _with_gradient(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first, *others = inputs
    return (first if first.requires_grad else first.detach().requires_grad_(), *others)


def _parts_of(model: nn.Module) -> dict[str, set[nn.Parameter]]:
    """Return the parameters of each part that --moe-train-only can name by a word, such as gates."""
    gates: set[nn.Parameter] = set()
    experts: set[nn.Parameter] = set()
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        for name, parameter in layer.named_parameters():
            (gates if name.startswith(GATES) else experts).add(parameter)
    parts = {"experts": experts, "gates": gates, "dense": set(model.parameters()) - experts - gates}
    for side in ("encoder", "decoder"):
        named = model.named_parameters(remove_duplicate=False)
        parts[side] = {parameter for name, parameter in named if side in name.split(".")}
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    parts["embeddings"] = {parameter for table in tables for parameter in table.parameters()}
    return parts


def _without(experts: list[int], grad: Tensor) -> Tensor:
    return grad.index_fill(0, torch.tensor(experts, dtype=torch.int64, device=grad.device), 0.0)


def refuse_other_parts(root: Any, state: Mapping[str, Any], path: str) -> None:
    """Raise ValueError if a checkpoint has optimizer state for other parameters than this run trains.

    fairseq finds a parameter's optimizer state by the parameter's position among the trained parameters.
    """
    saved = read(TaskConfig, (state.get("cfg") or {}).get("task")).moe_train_only
    given = read(TaskConfig, root.task).moe_train_only
    if state.get("last_optimizer_state") and {*saved.split(",")} != {*given.split(",")}:
        raise ValueError(
            f"--moe-train-only is {given or 'empty'}, but {path} has the optimizer state of a run with "
            f"{saved or 'none'}; add --reset-optimizer, or give the value of that run."
        )
