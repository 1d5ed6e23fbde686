"""Rejects checkpoints whose entries a model would load with wrong values."""

from collections.abc import Mapping
from typing import Any

import torch

from fairseq_tutel.files import shown


def refuse_malformed(state: Any, path: str) -> None:
    """Raise ValueError if a file holds no dictionary, or weights of a wrong dtype."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}; give a fairseq checkpoint.")
    refuse_weights(state.get("model") or {}, path)


def refuse_weights(weights: Mapping[str, Any], path: str) -> None:
    """Raise ValueError for a weight or bias of whole numbers, which torch would convert."""
    for key, value in weights.items():
        if not torch.is_tensor(value) or not str(key).endswith(("weight", "bias")):
            continue
        # In some models, attention masks are named "bias".
        if not (value.is_floating_point() or value.dtype in (torch.bool, torch.uint8)):
            raise ValueError(
                f"{path} has a tensor of the dtype {value.dtype} as the weight {shown(key)}; give a file "
                "with floating-point weights."
            )
