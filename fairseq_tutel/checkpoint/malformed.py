"""Rejects checkpoints whose entries have wrong types or values, before other code uses them."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch

from fairseq_tutel.checkpoint.files import walk
from fairseq_tutel.files import shown

# Required type of each entry that a checkpoint has; an entry that is None counts as absent.
TYPES = {"optimizer_history": list} | dict.fromkeys((
    "model", "cfg", "last_optimizer_state", "last_optimizer_state.state", "extra_state",
    "extra_state.train_iterator", "task_state", "optimizer_history.-1",
), Mapping)  # fmt: skip
# Numbers that are needed to resume training.
TIME = "extra_state.previous_training_time"
WHOLE = (
    "extra_state.train_iterator.epoch", "extra_state.train_iterator.iterations_in_epoch",
    "optimizer_history.-1.num_updates",
)  # fmt: skip
COUNT = "a number of at least 0"
# Entries of fairseq's meters.
METERS = ("val", "sum", "count", "n", "init", "start", "round")
ABSENT = object()
MOST_COUNTED = 2**53
# No real weight that repeats its data, such as an expanded tensor, is larger.
MOST_REPEATED_BYTES = 2**30


def refuse_malformed(state: Any, path: str) -> None:
    """Raise ValueError if an entry of a checkpoint has a type that fairseq never saves."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}; give a fairseq checkpoint.")
    for name, kind in TYPES.items():
        value = _entry(state, name)
        if value is not None and value is not ABSENT and not isinstance(value, kind):
            raise _error(path, value, name, "a list" if kind is list else "a dictionary")
    for name in (TIME, *WHOLE):
        value = _entry(state, name)
        if value is not ABSENT and not _is_count(value, whole=name in WHOLE):
            raise _error(path, value, name, f"a whole {COUNT[2:]}" if name in WHOLE else COUNT)
    for _, key, value in walk(state.get("last_optimizer_state")):
        if key == "step" and not _is_count(value):
            raise _error(path, value, "the optimizer's step", COUNT)
    for container, key, value in walk(_entry(state, "extra_state.metrics")):
        if isinstance(container, dict) and key in METERS and isinstance(value, str):
            raise _error(path, value, f"a metric's {key}", "a number")
    refuse_weights(state.get("model") or {}, path)


def refuse_weights(weights: Mapping[str, Any], path: str) -> None:
    """Raise ValueError for weights that no model can load, such as None or a tensor without data."""
    for key, value in weights.items():
        problem = _problem_of(key, value)
        if problem is not None:
            raise ValueError(
                f"{path} has {problem} as the weight {shown(key)}; give a file with dense tensors."
            )


def _entry(state: Any, name: str) -> Any:
    for key in name.split("."):
        try:
            state = state[-1 if key == "-1" else key]
        except (LookupError, TypeError):
            return ABSENT
    return state


def _is_count(value: Any, whole: bool = False) -> bool:
    if whole:
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        return is_whole and 0 <= int(value) < MOST_COUNTED
    # fairseq saves the training time of several ranks as a tensor.
    if torch.is_tensor(value) and value.numel() == 1 and value.device.type != "meta":
        value = value.item()
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 <= value < MOST_COUNTED


def _problem_of(key: Any, value: Any) -> str | None:
    """Return the reason why a model cannot load a value as a weight, or None if it can."""
    if not isinstance(key, str):
        return "a value"
    if value is None:
        return "None"
    if not torch.is_tensor(value) or key.endswith("_extra_state"):
        return None
    if value.layout != torch.strided or value.is_nested:
        return "a sparse or nested tensor"
    # In some models, attention masks are named "bias".
    is_number = value.is_floating_point() or value.dtype in (torch.bool, torch.uint8)
    if value.is_quantized or (key.endswith(("weight", "bias")) and not is_number):
        return f"a tensor of the dtype {value.dtype}"
    if value.ndim == 0 and ".experts." in key:
        return "a single number"
    if value.device.type == "meta":
        return "a tensor without data (meta)"
    size = value.numel() * value.element_size()
    if size > max(MOST_REPEATED_BYTES, value.untyped_storage().nbytes()):
        return f"a tensor of {size:,} bytes that repeats its data"
    return None


def _error(path: str, value: Any, name: str, words: str) -> ValueError:
    return ValueError(f"{path} has {shown(value)} as {name}, which must be {words}; give another file.")
