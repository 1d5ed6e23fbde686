"""Trains the last MoE layer's gate to choose the expert with the smallest loss (--cmcl-teach-router).

After the forward pass, the model runs once more for each expert, without gradients. In such a pass, the
last layer sends all tokens to one expert. The expert's weight is the sum of the token's routing weights.
Each pass starts from the same random state, so dropout masks and the routing of earlier layers are the
same. The gate's input is detached, so only the gate learns. Layers treat these passes as recomputations,
which are not counted or logged. Every rank runs the same number of passes, also for a dummy batch.

T tokens of the layer in the order (time, batch), N tokens of the target in the order (batch, time),
D model_dim, E experts, C words.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.capacity import Capacity
from fairseq_tutel.moe.choice import Chosen
from fairseq_tutel.moe.gates import HashGate, gate_input, gate_logits
from fairseq_tutel.moe.layer import MoELayer
from fairseq_tutel.moe.routing import Routing, placed
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, moe_layers, unwrapped


def forward_with_router_loss(
    model: nn.Module, sample: dict[str, Any], counts_N: Tensor
) -> tuple[Any, Tensor, Tensor]:
    """Run the model; return its output, a loss for the gate, and how often the gate chose the best expert.

    The gate's loss is the sum of the cross entropy between the gate's logits and the best experts, over
    tokens for which `counts_N` is true.
    """
    layer, target = _last_layer(model), sample["target"]
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    state, gpu_states = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    with _routed(layer) as seen:
        net_output = model(**sample["net_input"])
    if target.dim() != 2 or tuple(seen.call.shape) != tuple(target.shape[::-1]):
        raise ValueError(
            "--cmcl-teach-router needs one target per token, but the last MoE layer has tokens of shape "
            f"{tuple(seen.call.shape)}, and the target has {tuple(target.shape[::-1])} (time, batch); "
            "remove --cmcl-teach-router."
        )
    inner, losses = unwrapped(model), []  # there are no gradients to reduce
    for expert in range(layer.config.num_experts):
        with torch.no_grad(), torch.random.fork_rng(gpus), _routed(layer, expert):
            torch.set_rng_state(state)
            for gpu, gpu_state in zip(gpus, gpu_states, strict=True):
                torch.cuda.set_rng_state(gpu_state, gpu)
            # `forward` skips the module's hooks, which would start another micro-batch.
            output = inner.forward(**sample["net_input"])
            logs = inner.get_normalized_probs(output, log_probs=True)
            losses.append(-logs.gather(-1, target.unsqueeze(-1)).squeeze(-1))
    # The layer's tokens are in the order (time, batch).
    winner_T = torch.stack(losses).argmin(dim=0).t().reshape(-1)
    counts_T = counts_N.view_as(target).t().reshape(-1)
    gate, config = layer.gate_at(layer.config.gate_index)
    logits_TE = gate_logits(gate, gate_input(seen.x_TD, config, training=False), seen.call, config)
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    errors_T = F.cross_entropy(logits_TE, winner_T, reduction="none")
    right_T = (logits_TE.argmax(dim=1) == winner_T) & counts_T
    return net_output, errors_T.masked_fill(~counts_T, 0.0).sum(), right_T.sum()


class _Router:
    """Router that stores a layer's inputs and routes as the layer does, or sends all tokens to `expert`."""

    x_TD: Tensor
    call: Call

    def __init__(self, expert: int | None) -> None:
        self._expert = expert

    def routing_of(self, layer: MoELayer, x_TD: Tensor, call: Call) -> Routing:
        self.x_TD, self.call = x_TD.detach(), call
        own = layer.route(x_TD, call)  # also draws the layer's random numbers
        if self._expert is None:
            return own
        total_T1 = own.weights_TK.sum(dim=1, keepdim=True)
        chosen = Chosen(
            scores_TE=own.probs_TE,
            probs_TE=own.probs_TE,
            expert_ids_TK=torch.full_like(own.expert_ids_TK[:, :1], self._expert),
            # A token whose assignments were all dropped gets weight 1, since it also has a best expert.
            weights_TK=total_T1.masked_fill(total_T1 == 0, 1.0),
        )
        config = replace(layer.config, routed_scaling_factor=1.0, eom=0.0)  # weights are scaled already
        batch = replace(call.micro_batch(config, layer.training), capacity=Capacity())
        return placed(chosen, config, batch, own.gate)


@contextmanager
def _routed(layer: MoEFeedForward, expert: int | None = None) -> Iterator[_Router]:
    router = _Router(expert)
    layer.route_by(router)
    try:
        yield router
    finally:
        layer.route_by(None)


def _last_layer(model: nn.Module) -> MoEFeedForward:
    layers = moe_layers(model)
    if not layers:
        raise ValueError(
            "--cmcl-teach-router trains the gate of an MoE layer, but the model has no MoE layer; choose "
            "an architecture whose name begins with moe_, or remove --cmcl-teach-router."
        )
    layer = layers[-1]
    if layer.router is not None:
        raise ValueError(
            "--cmcl-teach-router and --moe-pregate cannot be combined, because a pre-gated layer's gate "
            "reads the input of another layer; remove one of the two flags."
        )
    if isinstance(layer.gate_at(layer.config.gate_index)[0], HashGate):
        raise ValueError("--cmcl-teach-router is set, but a hash gate has no parameters; remove the flag.")
    return layer
