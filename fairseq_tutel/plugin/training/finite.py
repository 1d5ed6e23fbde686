"""Checks weights and optimizer state for NaN and infinity before a save and after a load.

Buffers are not checked, because attention masks contain -inf. This module also ends a run that has already
reached its limit, such as --max-update, when it is started again.
"""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from fairseq.file_io import PathManager
from torch import Tensor, nn

from fairseq_tutel.checkpoint.files import mapped, walk
from fairseq_tutel.checkpoint.shards import ShardedTensor, bind
from fairseq_tutel.files import shown
from fairseq_tutel.parallel import world
from fairseq_tutel.plugin.feed_forward import unwrapped
from fairseq_tutel.plugin.optim.moe_optimizer import innermost_optimizer
from fairseq_tutel.plugin.training.loop import wrapping
from fairseq_tutel.plugin.training.resume import flag_and_path, newest_whole, saved_in

logger = logging.getLogger(__name__)

# The square of a larger weight is infinite in fp32.
LARGEST_WEIGHT = 1e19
# State tensors of fairseq's optimizers that have the same shape as their parameter.
SHAPED = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf",
    "momentum_buffer", "sum", "square_avg", "acc_delta",
)  # fmt: skip
LARGEST = 1e300  # larger integers cannot be converted to floats
# Options that fairseq's optimizers read. torch adds more to `defaults`, which groups may lack.
READ = ("betas", "eps", "weight_decay", "amsgrad")


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
    """Return a message about the first optimizer option or state that does not fit the model, or None."""
    for optimizer in optimizers_of(trainer):
        for parameter, state in optimizer.state.items():
            if not torch.is_tensor(parameter):
                return f"the optimizer's state of the unknown parameter {shown(parameter)}"
            for key in SHAPED if isinstance(state, Mapping) else ():
                # SGD without momentum has the value None.
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
    """Return whether an optimizer option's value has the type of its default and a valid range."""
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


def _has_form(value: Any, parameter: Tensor) -> bool:
    return (
        torch.is_tensor(value)
        and value.layout == torch.strided
        and value.is_floating_point()
        and value.shape == parameter.shape
    )


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
        way_back = way_back_from(trainer.cfg.checkpoint.save_dir, trainer.get_model())
        raise ValueError(
            f"after update {trainer.get_num_updates()}, {found} is NaN, infinite or larger than "
            f"{LARGEST_WEIGHT:g}, so no checkpoint was saved; lower --lr or set --clip-norm; {way_back}."
        )


def refuse_loaded(cfg: Any, trainer: Any) -> None:
    """Raise an error on all ranks if a loaded checkpoint does not fit or is not finite. Collective."""
    unfit = _on_any_rank(mismatch(trainer))
    found = unfit or _on_any_rank(first_bad(tensors_of(trainer)))
    if found is None:
        return
    flag, path = flag_and_path(cfg.checkpoint)
    if not PathManager.isfile(path):
        raise ValueError(
            f"in the new model, {found} is NaN, infinite or larger than {LARGEST_WEIGHT:g}; initialize it, "
            "or exclude it from training with requires_grad=False."
        )
    fix = " or add --reset-optimizer" if found.startswith("the optimizer's") else ""
    problem = "does not fit this run" if unfit else "is NaN, infinite or too large for training"
    raise ValueError(f"{flag} is {path}, in which {found} {problem}; give an older checkpoint{fix}.")


def way_back_from(save_dir: str, model: nn.Module, failed_at: int | None = None) -> str:
    """Return text for an error that names the newest checkpoint with finite weights. Collective.

    `failed_at` is the update at which the weights failed; None if these weights were not saved.
    """
    model = unwrapped(model)
    untrained = {name for name, _ in model.named_buffers()}
    untrained |= {name for name, p in model.named_parameters() if not p.requires_grad}

    def newest_good(before: float = math.inf) -> tuple[int, str] | None:
        paths = [*saved_in(save_dir), os.path.join(save_dir, "checkpoint_last.pt")]
        return newest_whole(paths, before=before, accepts=lambda path: _is_good(path, untrained))

    def look() -> str:
        found = newest_good()
        if found is None:
            return f"no checkpoint in {save_dir} is complete and finite"
        sentence = f"the newest complete checkpoint with finite weights is {found[1]} (update {found[0]})"
        if failed_at is None or found[0] < failed_at:
            return sentence
        older = newest_good(failed_at)
        before = f"the previous one is {older[1]} (update {older[0]})" if older else "none is older"
        return f"{sentence}, from which training fails the same way; {before}"

    return world.run_on_rank_zero(look, "rank 0's search for a checkpoint with finite weights")


def _is_good(path: str, untrained: set[str]) -> bool:
    try:
        state = mapped(path)
        bind(state, Path(path))
        weights = {k: v for k, v in state["model"].items() if k not in untrained}
        limited = (weights, LARGEST_WEIGHT), (state.get("last_optimizer_state"), math.inf)
        return all(
            first_bad([("", tensor, limit)]) is None
            for tree, limit in limited
            for _, _, value in walk(tree)
            for tensor in _tensors(value)
        )
    except Exception:  # torch raises many kinds of errors for an unreadable file
        return False


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an entry of the optimizer state; a sharded tensor yields each expert's."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, ShardedTensor):
        yield from (value.read(expert, 1) for expert in range(value.shape[0]))


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
            limit = world.broadcast_object(_reached_limit(cfg, trainer), "the check of limits")
            if limit is not None:
                logger.info("%s is already reached, so nothing was trained; raise it to continue", limit)
                return [None], True
        return original(cfg, trainer, task, epoch_itr)

    return wrapper


def _reached_limit(cfg: Any, trainer: Any) -> str | None:
    """Return the training limit that a resumed run has already reached; None if there is none.

    fairseq itself checks the limits only after an update.
    """
    options = cfg.optimization
    if 0 < options.max_update <= trainer.get_num_updates():
        return f"--max-update {options.max_update}"
    is_resumed = trainer.get_num_updates() > 0
    if is_resumed and 0 < options.stop_time_hours < trainer.cumulative_training_time() / 3600:
        return f"--stop-time-hours {options.stop_time_hours:g}"
    return None
