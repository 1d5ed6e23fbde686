"""Pre-gating: the experts of a MoE block are chosen by the input of the block N before it.

So they are known, and can be fetched, while the blocks between compute. The gate stays in the block whose
experts it chooses, with all that is decided by it and learned of it; what changes is which hidden states it
sees, of the same tokens. The first N blocks of a stack see their own.

T tokens, D model_dim. Source: Pre-gated MoE (Hwang et al. 2024).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.options import is_whole
from fairseq_tutel.moe.routing import Routing


def pregate(layers: Sequence[MoELayer], ahead: int) -> None:
    """Let the gate of each of these layers see the input of the one `ahead` before it.

    Args:
        layers: the MoE layers of one stack, in the order in which every forward calls them.
        ahead: N; 0 lets each see its own input, as without pre-gating.

    Raises:
        ValueError: a number that does not fit, a layer twice, or layers of different model_dim.
    """
    if ahead != 0 or not is_whole(ahead):
        refuse_too_far(ahead, {"stack": len(layers)})
    if len({id(layer) for layer in layers}) < len(layers):
        raise ValueError(
            "a layer stands twice in a stack to pre-gate, and has one gate; give a layer to each place."
        )
    dims = sorted({layer.config.model_dim for layer in layers})
    if len(dims) > 1:
        raise ValueError(
            f"layers have model_dim {' and '.join(map(str, dims))}; pre-gate layers of one model_dim, "
            "since a gate sees the input of another layer."
        )
    chain = Chain(layers, ahead) if ahead else None
    for layer in layers:
        layer.route_by(chain)


def refuse_too_far(ahead: int, blocks: Mapping[str, int]) -> None:
    """Refuse an N for which there is no stack with more MoE layers, or that is no number of them.

    Args:
        ahead: N.
        blocks: the MoE layers of each stack, by its name.

    Raises:
        ValueError: naming the fix.
    """
    most = max(blocks.values(), default=0) - 1
    if not (is_whole(ahead) and 1 <= ahead <= most):
        has = " and ".join(f"the {name} has {count} MoE layers" for name, count in blocks.items())
        fix = f"give 1 to {most}" if most > 0 else "leave it out, or make more layers MoE layers"
        raise ValueError(f"pregate (--moe-pregate) is {ahead!r} but {has}; {fix}.")


@dataclass(frozen=True)
class _Ahead:
    """A routing that waits for its layer, by which call it was made, and whether with gradients."""

    routing: Routing
    call: Call
    has_graph: bool


class Chain:
    """Routes the layers of one stack, each when the one N before it is called.

    A forward's routings are of no use to another one: the first layer begins anew, and who takes a routing
    takes it away.

    Args:
        layers: see `pregate`.
        ahead: N, from 1 to below their number.
    """

    def __init__(self, layers: Sequence[MoELayer], ahead: int) -> None:
        self.layers, self.ahead = list(layers), ahead
        self._waiting: dict[int, _Ahead] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what waits: a graph can be neither copied nor pickled."""
        return {**self.__dict__, "_waiting": {}}

    def routing_of(self, layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
        """Return the routing of a layer's forward, and make that of the layer N behind it.

        Raises:
            ValueError: the layer N before it was not called before, or otherwise.
        """
        place = self.layers.index(layer)
        if place == 0:
            self._waiting.clear()
        # Its own experts are asked for first, where nobody did before.
        routing = _announced(layer, x_TD, call) if place < self.ahead else self._take(place, call)
        later = place + self.ahead
        if later < len(self.layers):
            waiting = _announced(self.layers[later], x_TD, call)
            self._waiting[later] = _Ahead(waiting, call, torch.is_grad_enabled())
        return routing

    def _take(self, place: int, call: Call) -> Routing:
        """Return the routing that waits for a layer."""
        found = self._waiting.pop(place, None)
        label = self.layers[place].name or f"layer {place}"
        if found is None or (torch.is_grad_enabled() and not found.has_graph):
            raise ValueError(
                f"{label} is pre-gated, but the layer {self.ahead} before it, whose input its gate sees, "
                "was not called in this forward, or without gradients; call the layers of a stack in "
                "order, and without activation checkpointing."
            )
        if _asked(found.call) != _asked(call):
            raise ValueError(
                f"{label} is called with {_asked(call)}, but was pre-gated by a call with "
                f"{_asked(found.call)}; call the layers of a stack with the same tokens and arguments."
            )
        return found.routing


def _announced(layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
    """Return the routing of a layer, whose experts may be fetched from now on."""
    routing = layer.route(x_TD, call)
    layer.experts.weights.expect(layer.experts, routing.groups)
    return routing


def _asked(call: Call) -> dict[str, Any]:
    """Return what two calls for one routing must have in common."""
    names = ("shape", "time_first", "capacity_factor", "top_k", "gate_index")
    return {name: getattr(call, name) for name in names}
