"""--cmcl-teach-router: trains the gate of the last MoE layer to choose the expert with the smallest loss.

After the forward pass, the model runs once more for each expert, without gradients. Every token then goes
to that expert of the last layer alone, with the sum of its experts' weights. Masks are the same, since
random numbers are drawn from the same state, and so is the routing of earlier layers. For each token the
target is the expert with the smallest loss. The gate's input is detached, so that only the gate learns.
Layers treat these forward passes as recomputations, which are not counted or logged. Every rank runs the
same number of them, also for a dummy batch.

T tokens of the layer (time, batch), N of the target (batch, time), D model_dim, E experts, C words.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.choice import Chosen
from fairseq_tutel.moe.gates import HashGate, gate_input, gate_logits
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.routing import Routing, placed
from fairseq_tutel.moe.slots import Capacity
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, moe_layers, unwrapped


@dataclass(frozen=True)
class RouterLoss:
    """The loss of the gate in one micro-batch.

    Attributes:
        loss: [] sum over tokens of the cross entropy between the gate's logits and the best experts.
        right: [] int64, number of tokens whose first choice is the best expert.
    """

    loss: Tensor
    right: Tensor


def forward_with_router_loss(
    model: nn.Module, sample: dict[str, Any], counts_N: Tensor
) -> tuple[Any, RouterLoss]:
    """Return the model's output for a micro-batch, and the loss of its last gate.

    Args:
        model: with MoE layers, in training mode.
        sample: with net_input and target [batch, time].
        counts_N: [batch * time] bool, False for padding.
    """
    layer = _last_layer(model)
    watcher, before = _Watcher(), _random_state()
    with _routed_by(layer, watcher):
        net_output = model(**sample["net_input"])
    target = sample["target"]
    if target.dim() != 2 or tuple(watcher.call.shape) != tuple(target.shape[::-1]):
        raise ValueError(
            f"--cmcl-teach-router is set, and the last MoE layer's tokens {tuple(watcher.call.shape)} are "
            f"not those of the target {tuple(target.shape[::-1])} (time, batch), which have the losses; "
            "drop it."
        )
    inner, losses = unwrapped(model), []  # there are no gradients to reduce
    for expert in range(layer.config.num_experts):
        with torch.no_grad(), _drawing_from(before), _routed_by(layer, _Forced(expert)):
            # `forward` runs no hook, which would start another micro-batch.
            losses.append(_losses_of(inner, inner.forward(**sample["net_input"]), target))
    # The layer has time first.
    winner_T = torch.stack(losses).argmin(dim=0).t().reshape(-1)
    counts_T = counts_N.view_as(target).t().reshape(-1)
    logits_TE = _gate_logits(layer, watcher)
    errors_T = F.cross_entropy(logits_TE, winner_T, reduction="none")
    right_T = (logits_TE.argmax(dim=1) == winner_T) & counts_T
    return net_output, RouterLoss(errors_T.masked_fill(~counts_T, 0.0).sum(), right_T.sum())


class _Watcher:
    """Routes like the layer, and keeps its inputs."""

    x_TD: Tensor
    call: Call

    def routing_of(self, layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
        self.x_TD, self.call = x_TD.detach(), call
        return layer.route(x_TD, call)


class _Forced:
    """Routes every token to one expert; also runs the layer's routing, which draws random numbers."""

    def __init__(self, expert: int) -> None:
        self._expert = expert

    def routing_of(self, layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
        own = layer.route(x_TD, call)
        total_T1 = own.weights_TK.sum(dim=1, keepdim=True)
        chosen = Chosen(
            scores_TE=own.probs_TE,
            probs_TE=own.probs_TE,
            expert_ids_TK=torch.full_like(own.expert_ids_TK[:, :1], self._expert),
            # A token whose assignments were all dropped has a best expert, too.
            weights_TK=total_T1.masked_fill(total_T1 == 0, 1.0),
        )
        config = replace(layer.config, routed_scaling_factor=1.0)  # the weights are scaled already
        batch = replace(call.micro_batch(config, layer.training), capacity=Capacity())
        return placed(chosen, config, batch, own.gate)


def _last_layer(model: nn.Module) -> MoEFeedForward:
    layers = moe_layers(model)
    if not layers:
        raise ValueError(
            "--cmcl-teach-router trains the gate of an MoE layer, and the model has none; choose an "
            "architecture whose name begins with moe_, or drop it."
        )
    layer = layers[-1]
    if layer.router is not None:
        raise ValueError(
            "--cmcl-teach-router and --moe-pregate are both given, and a pre-gated layer's gate reads the "
            "input of another; drop one of them."
        )
    if isinstance(layer.gate_at(layer.config.gate_index)[0], HashGate):
        raise ValueError("--cmcl-teach-router is set, and a hash gate has no parameters; drop it.")
    return layer


def _gate_logits(layer: MoEFeedForward, watcher: _Watcher) -> Tensor:
    """Return the gate's logits on its input, without noise, in fp32 at least."""
    gate, config = layer.gate_at(layer.config.gate_index)
    seen_TD = gate_input(watcher.x_TD, config, training=False)
    logits_TE = gate_logits(gate, seen_TD, watcher.call, config)
    return logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))


def _losses_of(model: Any, net_output: Any, target: Tensor) -> Tensor:
    """Return every token's cross entropy, in the target's shape."""
    logs = model.get_normalized_probs(net_output, log_probs=True)
    return -logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


@contextmanager
def _routed_by(layer: MoEFeedForward, router: Any) -> Iterator[None]:
    layer.route_by(router)
    try:
        yield
    finally:
        layer.route_by(None)


def _random_state() -> tuple[Tensor, Tensor | None]:
    on_gpu = torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None


@contextmanager
def _drawing_from(state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Draw random numbers from this state in the block, and restore the previous state afterwards."""
    after = _random_state()
    _set_random_state(state)
    try:
        yield
    finally:
        _set_random_state(after)


def _set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    of_cpu, of_gpu = state
    torch.set_rng_state(of_cpu)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu)
