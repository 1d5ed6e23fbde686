"""Recognizes the system that wrote a checkpoint, such as Meta's moe branch, by the names of its tensors."""

from collections.abc import Collection

# Description of a checkpoint -> a part of a tensor's name that identifies such a checkpoint.
SIGNS = {
    "Meta's moe branch, one rank's experts": ".moe_layer.experts.",
    "Meta's moe branch, weights that all ranks share": ".moe_layer.",
    "Tutel, one rank's part": "_num_global_experts",
    "Tutel, one rank's part or a layer": "batched_fc1_w",
    "fairseq_tutel, the state dict of a layer or model": "experts.fc1_weight",
}


def kind_of(names: Collection[str]) -> str | None:
    """Return a description of the system that wrote a checkpoint with these tensor names, or None."""
    return next((kind for kind, sign in SIGNS.items() if any(sign in name for name in names)), None)
