"""State that all MoE layers of one model share; the integration writes it, and layers read it.

State of a single layer is set by its own methods: `MoEFeedForward.begin_call` and `begin_micro_batch`,
`MoELayer.follow`, `time_exchanges` and `watch_load`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Layer = Any  # a MoEFeedForward, which imports this file


class Context:
    """What currently holds for the layers of a model.

    Args:
        trains: the model is trained, not opened for use.
        gather: loads all experts on this rank, for generation during training, if ranks share them.
        wait_for_turn: returns when all ranks agree on a layer's call, where ranks call at their own pace.

    Attributes:
        is_dummy: the micro-batch only keeps ranks in step; it routes and counts nothing.
        token_ids: [batch, time], the last input of an embedding, for hash gates.
        padding_mask: [batch, time] bool of the last input, for decoders that pass no mask to their layers.
        coefficients: factors of layers' balance losses in the current backward pass.
    """

    def __init__(
        self,
        trains: bool = False,
        gather: Callable[[], object] | None = None,
        wait_for_turn: Callable[[Layer], None] | None = None,
    ) -> None:
        self.trains, self.gather, self.wait_for_turn = trains, gather, wait_for_turn
        self.is_dummy = False
        self.token_ids: Tensor | None = None
        self.padding_mask: Tensor | None = None
        self.coefficients: Mapping[Layer, Tensor] = {}

    def begin_step(self, is_dummy: bool = False) -> None:
        """Set whether the next batches are dummies."""
        self.is_dummy = is_dummy

    def see_tokens(self, token_ids: Tensor) -> None:
        """Keep the input of an embedding."""
        self.token_ids = token_ids

    def see_padding(self, mask: Tensor) -> None:
        """Keep the padding mask of an embedding's input."""
        self.padding_mask = mask

    def begin_backward(self, coefficients: Mapping[Layer, Tensor]) -> None:
        """Set factors of balance losses until `end_backward`."""
        self.coefficients = {**self.coefficients, **coefficients}

    def end_backward(self) -> None:
        """Remove the factors: a backward pass without a criterion's loss adds no balance loss."""
        self.coefficients = {}
