"""Averages the weights of several checkpoints."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.checkpoint.shards import ShardedTensor, unbind
from fairseq_tutel.parallel.zero_state import MASTER


def average(paths: list[Path], of_ema: bool = False) -> SavedModel:
    """Return a copy of the first checkpoint with the averaged weights of all given checkpoints.

    With `of_ema`, the function averages the EMA weights that --store-ema saved, or their fp32 copies if a
    checkpoint has such copies. Shard files are read one tensor at a time. Tied tensors stay tied. The
    function raises ValueError if names or shapes of the weights differ.
    """
    opened = [SavedModel.open(path, "INPUTS", keep_shards=True) for path in paths]
    models: list[dict[str, Any]] = [_ema_of(saved) if of_ema else saved.weights for saved in opened]
    for path, model in zip(paths[1:], models[1:], strict=True):
        _refuse_other_weights(paths[0], models[0], path, model)
    averaged: OrderedDict[str, Any] = OrderedDict()
    done: dict[tuple, Tensor] = {}
    for key in models[0]:
        tensors = [model[key] for model in models]
        if not isinstance(tensors[0], Tensor | ShardedTensor):
            averaged[key] = tensors[0]
            continue
        identity = tuple(
            (t.data_ptr(), t.shape, t.stride()) if isinstance(t, Tensor) else id(t) for t in tensors
        )
        if identity not in done:
            done[identity] = mean([t if isinstance(t, Tensor) else t.whole() for t in tensors])
        averaged[key] = done[identity]
    # Drop fp32 master weights, because a resumed run would use them instead of the averaged weights.
    first = opened[0].state
    kept = {key: _without(MASTER, part) for key, part in first.items() if key != "model"}
    unbind(kept)
    return SavedModel({**kept, "model": averaged})


def _ema_of(saved: SavedModel) -> dict[str, Any]:
    extra = saved.state.get("extra_state") or {}
    found = extra.get("ema_fp32_params") or extra.get("ema")
    if not (found and isinstance(found, dict)):
        raise ValueError(
            f"INPUTS names {saved.path}, which has no moving average of --store-ema; give another "
            "checkpoint, or remove --ema."
        )
    return found


def _without(name: str, tree: Any) -> Any:
    """Return a copy of nested dictionaries without entries that have the key `name`."""
    if not isinstance(tree, dict):
        return tree
    return {key: _without(name, part) for key, part in tree.items() if key != name}


def _refuse_other_weights(first: Path, expected: dict, other: Path, found: dict) -> None:
    for key in (*expected, *found):
        shapes = [tuple(getattr(m[key], "shape", ())) if key in m else "missing" for m in (expected, found)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the weight {key} is {shapes[0]} in {first} and {shapes[1]} in {other}; average "
                "checkpoints of one model."
            )


def mean(tensors: list[Tensor]) -> Tensor:
    """Return the elementwise mean of tensors of equal shape, in the dtype of the first tensor.

    Except for fp64, the sum has a wider dtype, so the mean of equal tensors is bit-identical to them. As
    in fairseq, integer means are rounded down.
    """
    dtype = tensors[0].dtype
    wider = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    total = torch.zeros_like(tensors[0], dtype=wider if dtype.is_floating_point else torch.int64)
    for tensor in tensors:
        total += tensor
    rounding = None if total.is_floating_point() else "floor"
    return torch.div(total, len(tensors), rounding_mode=rounding).to(dtype)
