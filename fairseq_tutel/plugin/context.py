"""What the edge tells the MoE layers of one model: one object, which the edge owns and layers read.

What it says of one layer alone is told to that layer by its methods: `MoEFeedForward.begin_call`
and `begin_micro_batch`, `MoELayer.follow`, `time_exchanges` and `watch_load`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Layer = Any  # a MoEFeedForward, which reads this


class Context:
    """What holds for the layers of a model now.

    Args:
        trains: whether the model is trained; else a command opened it for use.

    Attributes:
        is_dummy: the micro-batch keeps ranks in step; it routes and counts nothing.
        token_ids: [batch, time] that an embedding saw last, where a hash gate asks for them.
        padding_mask: [batch, time] bool that an embedding saw last, where a decoder tells layers of none.
        coefficients: what a layer's balance loss is multiplied with in the backward that runs.
        gather: gives this rank all experts where ranks share them in a training, to generate at its own
            pace.
        wait_for_turn: returns when all ranks agree on a layer's call, where they call at a pace of
            their own.
    """

    def __init__(self, trains: bool = False) -> None:
        self.trains = trains
        self.is_dummy = False
        self.token_ids: Tensor | None = None
        self.padding_mask: Tensor | None = None
        self.coefficients: Mapping[Layer, Tensor] = {}
        self.gather: Callable[[], object] | None = None
        self.wait_for_turn: Callable[[Layer], None] | None = None

    def begin_step(self, is_dummy: bool = False) -> None:
        """Say whether the batches that come are dummies."""
        self.is_dummy = is_dummy

    def see_tokens(self, token_ids: Tensor) -> None:
        """Keep the ids that an embedding is given."""
        self.token_ids = token_ids

    def see_padding(self, mask: Tensor) -> None:
        """Keep where the tokens that an embedding is given are padding."""
        self.padding_mask = mask

    def begin_backward(self, coefficients: Mapping[Layer, Tensor]) -> None:
        """Tell layers what their balance loss is multiplied with, until `end_backward`."""
        self.coefficients = {**self.coefficients, **coefficients}

    def end_backward(self) -> None:
        """Take the coefficients back: a backward without a criterion's loss adds nothing."""
        self.coefficients = {}

    def generate_by(self, gather: Callable[[], object]) -> None:
        """Let layers that generate within a training gather all experts first."""
        self.gather = gather

    def take_turns(self, wait_for_turn: Callable[[Layer], None]) -> None:
        """Let layers in evaluation wait for their turn."""
        self.wait_for_turn = wait_for_turn
