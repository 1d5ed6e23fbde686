"""Checks weights and optimizer state for NaN and infinity before a save and after a load.

Buffers are not checked, because attention masks contain -inf. This module also ends a run that has already
reached --max-update when it is started again.
"""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.files import shown
from fairseq_tutel.parallel import world
from fairseq_tutel.plugin.optim.moe_optimizer import innermost_optimizer
from fairseq_tutel.plugin.training.loop import wrapping
from fairseq_tutel.plugin.training.resume import flag_and_path

logger = logging.getLogger(__name__)

# The square of a larger weight is infinite in fp32.
LARGEST_WEIGHT = 1e19
# State tensors of fairseq's optimizers that have the same shape as their parameter.
SHAPED = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf",
    "momentum_buffer", "sum", "square_avg", "acc_delta",
)  # fmt: skip


def first_bad(named: Iterable[tuple[str, Tensor, float]]) -> str | None:
    """Return the name of the first tensor with a NaN or a value that is too large; None if all are fine.

    `named` contains (name, tensor, limit).
    """
    checked = [
        each for each in named if each[1].is_floating_point() and each[1].numel() and not each[1].is_meta
    ]
    # On a CPU the 2-norm is ten times as fast as the largest magnitude. If it is finite, all values are.
    norms = [_norm(tensor, 2) for _, tensor, _ in checked]
    # All norms are started before the first is read, so a GPU computes them without a pause.
    finite = [math.isfinite(norm.item()) for norm in norms]
    for (name, tensor, limit), is_finite in zip(checked, finite, strict=True):
        if not is_finite and not _norm(tensor, math.inf).item() < limit:
            return name
    return None


def _norm(tensor: Tensor, order: float) -> Tensor:
    if tensor.element_size() == 1:
        tensor = tensor.float()  # torch has no norms of 8-bit floats
    widened = torch.float32 if tensor.element_size() < 4 else None
    return torch.linalg.vector_norm(tensor.detach(), order, dtype=widened)


def tensors_of(trainer: Any) -> Iterator[tuple[str, Tensor, float]]:
    """Yield this rank's trained weights, fp32 copies and optimizer state, as (name, tensor, limit)."""
    names = {}
    for module in (trainer.get_model(), trainer.get_criterion()):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                names[id(parameter)] = name
                yield name, parameter, LARGEST_WEIGHT
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
                    yield name, parameter, LARGEST_WEIGHT
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "a weight")
            for key, value in state.items():
                if torch.is_tensor(value):
                    yield f"the optimizer's {key} of {name}", value, math.inf


def optimizers_of(trainer: Any) -> Iterator[Any]:
    """Yield the torch optimizers of a trainer: several for a composite optimizer, otherwise one."""
    inner = innermost_optimizer(trainer.optimizer)
    for part in getattr(inner.optimizer, "optimizers", {"": inner}).values():
        yield part.optimizer


def mismatch(trainer: Any) -> str | None:
    """Return a message about the first optimizer state that does not fit its parameter, or None."""
    for optimizer in optimizers_of(trainer):
        for parameter, state in optimizer.state.items():
            if not torch.is_tensor(parameter):
                return f"the optimizer's state of the unknown parameter {shown(parameter)}"
            for key in SHAPED if isinstance(state, Mapping) else ():
                moment = state.get(key)  # None for SGD without momentum
                fits = getattr(moment, "shape", None) == parameter.shape and moment.is_floating_point()
                if moment is not None and not fits:
                    return f"the optimizer's {key} of a parameter {tuple(parameter.shape)}"
    return None


def _on_any_rank(found: str | None) -> str | None:
    """Return, on all ranks, the first problem that any rank found, or None. Collective."""
    names = world.all_gather_object(found, "the check for NaN and infinity")
    for rank, name in enumerate(names):
        if name:
            return f"{name} on rank {rank}" if len(names) > 1 else name
    return None


def refuse_to_save(trainer: Any) -> None:
    """Raise an error on all ranks if any rank would save a NaN or infinity. Collective."""
    found = _on_any_rank(first_bad(tensors_of(trainer)))
    if found is not None:
        raise ValueError(
            f"after update {trainer.get_num_updates()}, {found} is NaN, infinite or larger than "
            f"{LARGEST_WEIGHT:g}, so no checkpoint was saved; lower --lr or set --clip-norm, and continue "
            "from the last checkpoint."
        )


def refuse_loaded(cfg: Any, trainer: Any) -> None:
    """Raise an error on all ranks if a loaded checkpoint does not fit or is not finite. Collective."""
    unfit = _on_any_rank(mismatch(trainer))
    found = unfit or _on_any_rank(first_bad(tensors_of(trainer)))
    if found is None:
        return
    flag, path = flag_and_path(cfg.checkpoint)
    fix = " or add --reset-optimizer" if found.startswith("the optimizer's") else ""
    problem = "does not fit this run" if unfit else "is NaN, infinite or too large for training"
    where = f"{flag} is {path}, in which" if os.path.isfile(path) else "in the new model,"
    raise ValueError(f"{where} {found} {problem}; give an older checkpoint{fix}.")


@contextlib.contextmanager
def checked_at_start(main: Any) -> Iterator[None]:
    """Context manager in which the loaded state is checked before fairseq trains the first epoch.

    In the block, a wrapper replaces fairseq's function `train`, which trains one epoch.
    """
    with wrapping(main, train=_checked):
        yield


def _checked(original: Any) -> Any:
    is_first = True

    @functools.wraps(original)
    def wrapper(cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            refuse_loaded(cfg, trainer)
            limit = cfg.optimization.max_update
            if 0 < limit <= trainer.get_num_updates():  # fairseq checks this only after an update
                logger.info("--max-update %d is already reached, so nothing was trained", limit)
                return [None], True
        return original(cfg, trainer, task, epoch_itr)

    return wrapper
