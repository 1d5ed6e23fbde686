"""Pre-gating: the gate of a MoE block gets the input of the N-th MoE block before it.

So the experts are known while the blocks between compute, and offloaded ones can be fetched. The first N
blocks of a stack use their own input. T tokens, D model_dim. Source: Pre-gated MoE (Hwang et al. 2024).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.options.option import is_whole


def pregate(layers: Sequence[MoELayer], ahead: int) -> None:
    """Give the gate of each layer the input of the layer `ahead` (N) before it; 0 disables pre-gating.

    `layers` are the MoE layers of one stack, in the order in which every forward calls them.

    Raises:
        ValueError: an invalid N, a repeated layer, or layers of different model_dim.
    """
    if ahead != 0 or not is_whole(ahead):
        refuse_too_far(ahead, {"stack": len(layers)})
    if len({id(layer) for layer in layers}) < len(layers):
        raise ValueError(
            "a layer is repeated in a stack to pre-gate, but has one gate; give different layers."
        )
    dims = sorted({layer.config.model_dim for layer in layers})
    if len(dims) > 1:
        raise ValueError(
            f"layers have model_dim {' and '.join(map(str, dims))}; pre-gate layers of one model_dim, "
            "since a gate gets the input of another layer."
        )
    chain = Chain(layers, ahead) if ahead else None
    for layer in layers:
        layer.route_by(chain)


def refuse_too_far(ahead: int, blocks: Mapping[str, int]) -> None:
    """Raise ValueError unless a stack has more than N MoE layers."""
    most = max(blocks.values(), default=0) - 1
    if not (is_whole(ahead) and 1 <= ahead <= most):
        has = " and ".join(f"the {name} has {count} MoE layers" for name, count in blocks.items())
        fix = f"give 1 to {most}" if most > 0 else "leave it out, or make more layers MoE layers"
        raise ValueError(f"pregate (--moe-pregate) is {ahead!r} but {has}; {fix}.")


class _Ahead(NamedTuple):
    """A routing for a later layer, with its call and whether it has gradients."""

    routing: Routing
    call: Call
    has_graph: bool


class Chain:
    """Routes the layers of one stack, each when the layer N before it is called, for that forward only."""

    def __init__(self, layers: Sequence[MoELayer], ahead: int) -> None:
        self.layers, self.ahead = list(layers), ahead
        self._pending: dict[int, _Ahead] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Omit the pending routings: an autograd graph can be neither copied nor pickled."""
        return {**self.__dict__, "_pending": {}}

    def routing_of(self, layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
        """Return the routing of a layer's forward, and compute that of the layer N behind it."""
        index = self.layers.index(layer)
        if index == 0:
            self._pending.clear()
        # The first N layers fetch their own experts before those of later layers.
        routing = _prefetched(layer, x_TD, call) if index < self.ahead else self._take(index, call)
        later = index + self.ahead
        if later < len(self.layers):
            ahead = _prefetched(self.layers[later], x_TD, call)
            self._pending[later] = _Ahead(ahead, call, torch.is_grad_enabled())
        return routing

    def _take(self, index: int, call: Call) -> Routing:
        """Remove and return the pending routing of a layer."""
        found = self._pending.pop(index, None)
        label = self.layers[index].name or f"layer {index}"
        if found is None or (torch.is_grad_enabled() and not found.has_graph):
            raise ValueError(
                f"{label} is pre-gated, but the layer {self.ahead} before it, whose input its gate needs, "
                "was not called in this forward, or without gradients; call the layers of a stack in "
                "order, and without activation checkpointing."
            )
        names = ("shape", "time_first", "capacity_factor", "top_k", "gate_index")
        given, before = ({name: getattr(one, name) for name in names} for one in (call, found.call))
        if given != before:
            raise ValueError(
                f"{label} is called with {given}, but was pre-gated by a call with {before}; call the "
                "layers of a stack with the same tokens and arguments."
            )
        return found.routing


def _prefetched(layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
    """Return the routing of a layer and begin to fetch its experts."""
    routing = layer.route(x_TD, call)
    layer.experts.weights.prefetch(layer.experts, routing.groups)
    return routing
