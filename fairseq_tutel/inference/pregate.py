"""Pre-gating: the gate of a MoE layer gets the input of the MoE layer N positions earlier.

Experts of a layer are thus chosen early, and offloaded experts can be fetched while the layers in between
compute. The gates of the first N layers of a stack get the input of their own layer. Shape suffixes are T
(tokens) and D (model_dim). The method is from Hwang et al. 2024, Pre-gated MoE.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.option import is_whole


def pregate(layers: Sequence[MoELayer], ahead: int) -> None:
    """Enable pre-gating: each layer's gate gets the input of the layer that is `ahead` positions earlier.

    Args:
        layers: different MoE layers of one stack and one model_dim, in the order in which every forward
            pass calls them.
        ahead: N, the number of positions; 0 disables pre-gating.

    Raises:
        ValueError: N is not an integer from 0 to len(layers) - 1.

    Example:
        >>> config = ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8)
        >>> layers = [ft.MoELayer(config) for _ in range(3)]
        >>> ft.pregate(layers, 1)
        >>> x = torch.randn(10, 64)
        >>> for layer in layers:
        ...     x = x + layer(x)[0]
    """
    if ahead != 0 or not is_whole(ahead):
        refuse_too_far(ahead, {"stack": len(layers)})
    chain = Chain(layers, ahead) if ahead else None
    for layer in layers:
        layer.router = chain


def refuse_too_far(ahead: int, blocks: Mapping[str, int]) -> None:
    """Raise ValueError unless 1 <= `ahead` < n, where n is the largest number of layers in `blocks`."""
    most = max(blocks.values(), default=0) - 1
    if not (is_whole(ahead) and 1 <= ahead <= most):
        has = " and ".join(f"the {name} has {count} MoE layers" for name, count in blocks.items())
        fix = f"give 1 to {most}" if most > 0 else "remove the option, or make more layers MoE layers"
        raise ValueError(f"pregate (--moe-pregate) is {ahead!r} but {has}; {fix}.")


class _Ahead(NamedTuple):
    """The routing of a later layer, the call that computed it, and whether the routing has gradients."""

    routing: Routing
    call: Call
    has_graph: bool


class Chain:
    """Computes the routing of each layer in a stack when the layer N positions earlier is called.

    A precomputed routing is used only in the forward pass that computed it.
    """

    def __init__(self, layers: Sequence[MoELayer], ahead: int) -> None:
        self.layers, self.ahead = list(layers), ahead
        self._pending: dict[int, _Ahead] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without pending routings, whose autograd graph cannot be copied or pickled."""
        return {**self.__dict__, "_pending": {}}

    def routing_of(self, layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
        """Return the routing of a layer, and compute the routing of the layer N positions later."""
        index = self.layers.index(layer)
        if index == 0:
            self._pending.clear()
        # A layer must request its own experts before those of a later layer.
        routing = _prefetched(layer, x_TD, call) if index < self.ahead else self._take(index, call)
        later = index + self.ahead
        if later < len(self.layers):
            ahead = _prefetched(self.layers[later], x_TD, call)
            self._pending[later] = _Ahead(ahead, call, torch.is_grad_enabled())
        return routing

    def _take(self, index: int, call: Call) -> Routing:
        """Remove and return a layer's pending routing; raise ValueError if it is unusable in `call`."""
        found = self._pending.pop(index, None)
        label = self.layers[index].name or f"layer {index}"
        if found is None or (torch.is_grad_enabled() and not found.has_graph):
            raise ValueError(
                f"{label} is pre-gated, but the layer {self.ahead} before it, whose input the gate needs, "
                "was not called in this forward pass, or was called without gradients; call the layers of "
                "a stack in order, and without activation checkpointing."
            )
        names = ("shape", "time_first", "capacity_factor", "top_k", "gate_index")
        given, before = ({name: getattr(one, name) for name in names} for one in (call, found.call))
        if given != before:
            raise ValueError(
                f"{label} is called with {given}, but was pre-gated with {before}; call all layers of the "
                "stack with the same tokens and arguments."
            )
        return found.routing


def _prefetched(layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
    """Return the routing of a layer, and begin to fetch the layer's experts."""
    routing = layer.route(x_TD, call)
    layer.experts.weights.prefetch(layer.experts, routing.groups)
    return routing
