"""Recognizes the system that wrote a checkpoint, such as Meta's moe branch, by the names of its tensors."""

import re
from collections.abc import Collection

META = "Meta's moe branch"
# Description of a checkpoint -> pattern of a part of a tensor's name that identifies such a checkpoint.
SIGNS = {
    f"{META}, one rank's experts": r"\.moe_layer\.experts\.(\w+_module\.)*\d+\.",
    f"{META}, weights that all ranks share": r"\.moe_layer\.gate\.wg\.",
    "Tutel, one rank's part": "_num_global_experts",
    "Tutel, one rank's part or a layer": "batched_fc1_w",
    "fairseq_tutel, the state dict of a layer or model": r"experts\.fc1_weight",
}


def kind_of(names: Collection[str]) -> str | None:
    """Return a description of the system that wrote a checkpoint with these tensor names, or None."""
    return next((kind for kind, sign in SIGNS.items() if any(re.search(sign, n) for n in names)), None)


def refuse_meta(names: Collection[str], path: str) -> None:
    """Raise ValueError if a checkpoint with these tensor names is a file of Meta's moe branch."""
    kind = kind_of(names) or ""
    if kind.startswith(META) and not any("experts.fc1_weight" in name for name in names):
        raise ValueError(
            f"{path} is a file of {kind}; convert it with `fairseq-tutel convert meta {path} "
            "--output model.pt`, and give the output."
        )
