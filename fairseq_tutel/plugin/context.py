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
    """

    def __init__(
        self,
        trains: bool = False,
        gather: Callable[[], object] | None = None,
        wait_for_turn: Callable[[Layer], None] | None = None,
    ) -> None:
        self.trains, self.gather, self.wait_for_turn = trains, gather, wait_for_turn
        # The micro-batch only keeps ranks in step: it routes and counts nothing.
        self.is_dummy = False
        # [batch, time], the last input of an embedding, for hash gates.
        self.token_ids: Tensor | None = None
        # [batch, time] bool of that input, for decoders that pass no mask to their layers.
        self.padding_mask: Tensor | None = None
        # Factors of layers' balance losses in the current backward pass.
        self.coefficients: Mapping[Layer, Tensor] = {}

    def begin_step(self, is_dummy: bool = False) -> None:
        """Set whether the next batches are dummies."""
        self.is_dummy = is_dummy

    def see_tokens(self, embedding: Any, args: tuple) -> None:
        """Keep the input of an embedding; a pre-hook."""
        self.token_ids = args[0]

    def see_padding(self, embedding: Any, args: tuple) -> None:
        """Keep the padding mask of an embedding's input; a pre-hook."""
        self.padding_mask = args[0].eq(embedding.padding_idx)

    def begin_backward(self, coefficients: Mapping[Layer, Tensor]) -> None:
        """Set factors of balance losses until `end_backward`."""
        self.coefficients = {**self.coefficients, **coefficients}

    def end_backward(self) -> None:
        """Remove the factors: a backward pass without a criterion's loss adds no balance loss."""
        self.coefficients = {}
