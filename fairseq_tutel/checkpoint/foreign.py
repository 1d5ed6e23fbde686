"""Recognizes the system that wrote a checkpoint, and rejects weights that a model would load wrongly."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from fairseq_tutel.files import shown

META = "Meta's moe branch"
# For each kind of checkpoint, a pattern that some of its tensor names match.
SIGNS = {
    f"{META}, one rank's experts": r"\.moe_layer\.experts\.(\w+_module\.)*\d+\.",
    f"{META}, weights that all ranks share": r"\.moe_layer\.gate\.wg\.",
    "Tutel, one rank's part": "_num_global_experts",
    "Tutel, one rank's part or a layer": "batched_fc1_w",
    "fairseq_tutel, the state dict of a layer or model": r"experts\.fc1_weight",
}


def kind_of(names: Collection[str]) -> str | None:
    """Return the kind in `SIGNS` whose pattern matches one of the tensor names, or None."""
    return next((kind for kind, sign in SIGNS.items() if any(re.search(sign, n) for n in names)), None)


def refuse_meta(names: Collection[str], path: str) -> None:
    """Raise ValueError if tensor names show that a checkpoint is a file of Meta's moe branch."""
    kind = kind_of(names) or ""
    if kind.startswith(META) and not any("experts.fc1_weight" in name for name in names):
        raise ValueError(
            f"{path} is a file of {kind}; convert it with `fairseq-tutel convert meta {path} "
            "--output model.pt`, and give the output."
        )


def refuse_malformed(state: Any, path: str) -> None:
    """Raise ValueError if a file contains no dictionary, or if its weights have a wrong dtype."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}; give a fairseq checkpoint.")
    refuse_weights(state.get("model") or {}, path)


def refuse_weights(weights: Mapping[str, Any], path: str) -> None:
    """Raise ValueError for an integer weight or bias, which torch would convert to floating-point."""
    for key, value in weights.items():
        # In some models, attention masks of dtype bool or uint8 are buffers named "bias".
        if (
            torch.is_tensor(value)
            and str(key).endswith(("weight", "bias"))
            and not (value.is_floating_point() or value.dtype in (torch.bool, torch.uint8))
        ):
            raise ValueError(
                f"{path} has a tensor of the dtype {value.dtype} as the weight {shown(key)}; give a file "
                "with floating-point weights."
            )
