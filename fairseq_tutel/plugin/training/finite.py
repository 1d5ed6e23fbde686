"""Checks weights and optimizer state for NaN and infinity before a save and after a load.

Buffers are not checked, because attention masks contain -inf.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.parallel import world
from fairseq_tutel.plugin.optim.moe_optimizer import innermost_optimizer
from fairseq_tutel.plugin.training.resume import flag_and_path

# The measure of a tensor is NaN or infinite if an element of the tensor is. The 2-norm of weights is also
# infinite if a weight is larger than about 1e19, so such weights are refused, too.
Measure = Callable[..., Tensor]
OF_WEIGHTS, OF_STATE = torch.linalg.vector_norm, torch.sum
# Names of state tensors of fairseq's optimizers that have the same shape as their parameter.
SHAPED = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf",
    "momentum_buffer", "sum", "square_avg", "acc_delta",
)  # fmt: skip


def first_bad(named: Iterable[tuple[str, Tensor, Measure]]) -> str | None:
    """Return the name of the first tensor whose measure is not finite, or None if all are finite.

    `named` yields tuples (name, tensor, measure).
    """
    measured = [
        (name, measure(tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32)))
        for name, tensor, measure in named
        if tensor.is_floating_point() and not tensor.is_meta
    ]
    # All measures are computed before the host reads the first result, so a GPU need not wait for the host.
    return next((name for name, value in measured if not math.isfinite(value.item())), None)


def tensors_of(trainer: Any) -> Iterator[tuple[str, Tensor, Measure]]:
    """Yield this rank's trained weights, fp32 masters and optimizer state, as (name, tensor, measure)."""
    names = {}
    for module in (trainer.get_model(), trainer.get_criterion()):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                names[id(parameter)] = name
                yield name, parameter, OF_WEIGHTS
    weights = set(names)
    inner = innermost_optimizer(trainer.optimizer)
    zero = getattr(inner, "zero", None)
    whole = inner.model_params() if zero else getattr(trainer.optimizer, "fp16_params", ())
    for parameter, own in zip(whole, zero.parameters if zero else inner.params, strict=False):
        names.setdefault(id(own), f"the fp32 master of {names.get(id(parameter), 'a weight')}")
    for optimizer in optimizers_of(trainer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in weights:
                    name = names.get(id(parameter), "an fp32 master")
                    yield name, parameter, OF_WEIGHTS
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "a weight")
            for key, value in state.items():
                if torch.is_tensor(value):
                    yield f"the optimizer's {key} of {name}", value, OF_STATE


def optimizers_of(trainer: Any) -> Iterator[Any]:
    """Yield each torch optimizer of a trainer; only a composite optimizer has several."""
    inner = innermost_optimizer(trainer.optimizer)
    for part in getattr(inner.optimizer, "optimizers", {"": inner}).values():
        yield part.optimizer


def mismatch(trainer: Any) -> str | None:
    """Return a message about the first state tensor whose shape differs from its parameter's, or None."""
    for optimizer in optimizers_of(trainer):
        for parameter, state in optimizer.state.items():
            for key in SHAPED:
                moment = state.get(key)  # SGD may have no momentum.
                fits = getattr(moment, "shape", None) == parameter.shape and moment.is_floating_point()
                if moment is not None and not fits:
                    shape = tuple(parameter.shape)
                    return f"the optimizer's {key} of a parameter {shape} does not fit this run"
    return None


def _on_any_rank(found: str | None) -> str | None:
    """Return on all ranks the first problem that any rank found, or None for no problem. Collective."""
    names = world.all_gather_object(found, "the check for NaN and infinity")
    for rank, name in enumerate(names):
        if name:
            return f"{name} on rank {rank}" if len(names) > 1 else name
    return None


def refuse_to_save(trainer: Any) -> None:
    """Raise an error on all ranks if any rank would save a NaN or infinity in a checkpoint. Collective."""
    found = _on_any_rank(first_bad(tensors_of(trainer)))
    if found is not None:
        raise ValueError(
            f"after update {trainer.get_num_updates()}, {found} is NaN, infinite or larger than 1e19, so "
            "no checkpoint was saved; lower --lr or set --clip-norm, and continue from the last checkpoint."
        )


def refuse_loaded(cfg: Any, trainer: Any) -> None:
    """Raise an error on all ranks if loaded state has a wrong shape, NaN or infinity. Collective."""
    bad = first_bad(tensors_of(trainer))
    found = _on_any_rank(mismatch(trainer) or (bad and f"{bad} is NaN, infinite or too large for training"))
    if found is not None:
        flag, path = flag_and_path(cfg.checkpoint)
        raise ValueError(
            f"{flag} is {path}, but {found}; give an older checkpoint or, if only the optimizer's state is "
            "bad, --reset-optimizer."
        )
