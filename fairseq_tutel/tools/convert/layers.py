"""The feed-forward steps in a model's state dict, dense and with experts, by the names of their tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fairseq_tutel.plugin.feed_forward import label_of

# Of a layer's dense step, without the layer's name: what every one has, and what --scale-fc adds.
DENSE = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
LAYER_NORM = ("ffn_layernorm.weight", "ffn_layernorm.bias")

_LAYER = re.compile(
    r"(?P<name>(?P<side>encoder|decoder)(?P<inner>\.sentence_encoder)?\.layers\.(?P<index>\d+))"
    r"\.fc1\.(?P<what>weight|experts\.)"
)


@dataclass(frozen=True, order=True)
class Layer:
    """A layer of a model, ordered as --moe-expert-count orders them: the encoder's first.

    Attributes:
        on_decoder: whether it is one of the decoder's.
        index: within its side, from 0.
        name: before its tensors, such as decoder.layers.1.
        has_experts: in place of the dense step.
    """

    on_decoder: bool
    index: int
    name: str
    has_experts: bool

    @property
    def side(self) -> str:
        """The side's name."""
        return "decoder" if self.on_decoder else "encoder"

    @property
    def step(self) -> str:
        """The name of what stands where fairseq calls fc1."""
        return f"{self.name}.fc1"

    @property
    def label(self) -> str:
        """The layer's name in logs and options, such as decoder_1."""
        return label_of(self.step)


def layers_of(model: Mapping[str, Any]) -> list[Layer]:
    """Return the layers with a feed-forward step, in order."""
    found = set()
    for key in model:
        if match := _LAYER.match(key):
            # Before roberta's encoder was called so, it was decoder.sentence_encoder.
            on_decoder = match["side"] == "decoder" and not match["inner"]
            has_experts = match["what"] != "weight"
            found.add(Layer(on_decoder, int(match["index"]), match["name"], has_experts))
    return sorted(found)


def dense_step(model: Mapping[str, Tensor], layer: Layer) -> dict[str, Tensor]:
    """Return the tensors of a dense feed-forward step by their names within the layer.

    Raises:
        ValueError: one is missing.
    """
    step = {key: model.get(f"{layer.name}.{key}") for key in (*DENSE, *LAYER_NORM)}
    missing = [key for key in DENSE if step[key] is None]
    if missing:
        raise ValueError(
            f"--input lacks {layer.name}.{missing[0]}, without which the layer has no feed-forward step of "
            "fairseq's; give a checkpoint of a transformer."
        )
    return {key: tensor for key, tensor in step.items() if tensor is not None}
