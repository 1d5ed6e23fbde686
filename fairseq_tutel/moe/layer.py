"""The MoE layer with its balance losses. T tokens, D model_dim, E experts, K top_k, R rows."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_tutel.moe.adaptive import static_strategy
from fairseq_tutel.moe.balance import BalanceBias, balance_losses
from fairseq_tutel.moe.call import Call
from fairseq_tutel.moe.choice import choose_from
from fairseq_tutel.moe.config import MoEConfig, parse_balance_loss
from fairseq_tutel.moe.decode import are_few, can_defer, decide_few
from fairseq_tutel.moe.dispatch import Dispatcher, OwnExperts, choose_dispatcher
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.moe.experts import build_experts
from fairseq_tutel.moe.gates import (
    build_gate,
    gate_input,
    gate_logits,
    noisy_logits,
    reset_gate,
)
from fairseq_tutel.moe.routing import GateOutput, Routing, decide, mask_outputs
from fairseq_tutel.moe.shared_experts import SharedResidualExperts
from fairseq_tutel.moe.slots import Capacity
from fairseq_tutel.option import is_whole
from fairseq_tutel.parallel.call_id import CallCounter
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.strategy import Strategy
from fairseq_tutel.parallel.transfer import ExchangeTimer


@dataclass(eq=False)
class MoEOutput:
    """The balance losses and the routing of one forward pass.

    In evaluation without gradients, the losses are computed at their first access.

    Attributes:
        routing: the assignments of tokens to experts.
        balance_weights: the weight of each balance loss, by name.
        losses: the unweighted balance losses by name, scalars.
        balance_loss: the weighted sum of `losses`, differentiable, in fp32 or fp64; 0 without losses.
        cmr_sum: the CMR gate, summed over tokens except padding, differentiable; None without CMR.

    Example:
        >>> layer = ft.MoELayer(ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8))
        >>> y, output = layer(torch.randn(10, 64))
        >>> list(output.losses), output.routing.counts_E.shape
        (['gshard'], torch.Size([8]))
    """

    routing: Routing
    balance_weights: dict[str, float]

    @cached_property
    def losses(self) -> dict[str, Tensor]:
        """The unweighted balance losses by name. Some losses run a collective at the first access."""
        assert self.routing.gate is not None
        return balance_losses(self.balance_weights, self.routing, self.routing.gate)

    @cached_property
    def balance_loss(self) -> Tensor:
        """The weighted sum of all balance losses."""
        weights = self.balance_weights
        weighted = [x if weights[name] == 1 else weights[name] * x for name, x in self.losses.items()]
        return reduce(torch.add, weighted) if weighted else self.routing.probs_TE.new_zeros(())

    @cached_property
    def cmr_sum(self) -> Tensor | None:
        """The CMR gate (--moe-cmr, conditional MoE routing), summed over all tokens except padding."""
        gate = self.routing.gate
        if gate is None or gate.cmr_T1 is None:
            return None
        cmr_T, real_T = gate.cmr_T1.squeeze(1), self.routing.real_T
        cmr_T = cmr_T.to(torch.promote_types(cmr_T.dtype, torch.float32))
        return (cmr_T if real_T is None else cmr_T.masked_fill(~real_T, 0.0)).sum()


class MoELayer(nn.Module):
    """A mixture of experts that replaces a feed-forward layer.

    The forward pass calls `route`, `apply_routing` and `balance`.

    Args:
        config: the options of the layer.
        topology: the ranks that own the experts; None for one rank with all experts.
        seed: seed of the layer's generators. None draws a seed from torch's global generator, which must
            then have the same seed on every rank.
        name: gives layers with the same seed different parameters.
        gate_configs: the configuration of each gate, if the layer has several gates. Only options that
            apply before dispatch may differ. None builds a gate for every name in `config.gate_type`.
        gates: existing gates, one for each configuration; built-in gates are initialized again from `seed`.
        experts: existing experts in place of new experts; they are initialized again from `seed`.

    Raises:
        ValueError: `config` does not fit the topology.

    Example:
        >>> layer = ft.MoELayer(ft.MoEConfig(model_dim=64, hidden_dim=256, num_experts=8))
        >>> x = torch.randn(4, 10, 64)  # batch, time, model_dim
        >>> y, output = layer(x, capacity_factor=1.25)
        >>> (y.square().mean() + 0.01 * output.balance_loss).backward()
        >>> y.shape
        torch.Size([4, 10, 64])
    """

    router: Any = None  # if set, this object routes several layers, as in inference/pregate.py

    def __init__(
        self,
        config: MoEConfig,
        topology: Topology | None = None,
        *,
        seed: int | None = None,
        name: str = "",
        gate_configs: Sequence[MoEConfig] | None = None,
        gates: Sequence[nn.Module] | None = None,
        experts: ExpertStack | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.topology = topology or Topology()
        self.configure(config, gate_configs or [config] * len(config.gate_types))
        if gates is None:
            kinds = config.gate_types if gate_configs is None else [c.gate_type for c in gate_configs]
            gates = [build_gate(c, kind) for c, kind in zip(self.gate_configs, kinds, strict=True)]
        self.gate = gates[0]
        self.other_gates = nn.ModuleList(gates[1:])
        self.experts = experts or build_experts(config, self.topology.part(config.num_experts))
        self.experts.mark()
        self.strategy = static_strategy(config, self.topology)
        beside = config.shared_experts or config.residual or config.cmr
        self.beside = SharedResidualExperts(config) if beside else None
        rate = config.bias_update_rate
        self.balance_bias = (
            BalanceBias(config.num_experts, rate, self.topology) if config.balance_bias else None
        )
        group = self.topology.expert_group
        self.calls = None if group is None else CallCounter(group, name, self.experts.num_local)
        self.timer: ExchangeTimer | None = None
        self.reset_parameters(int(torch.randint(2**62, ())) if seed is None else seed, name)

    def configure(self, config: MoEConfig, gate_configs: Sequence[MoEConfig]) -> None:
        """Replace the configurations of the layer and of each gate, but keep the existing modules."""
        self.config = config
        self.gate_configs = [
            # `replace` checks that each gate has the options that the balance losses need, such as noise.
            dataclasses.replace(c, balance_loss=config.balance_loss)
            for c in gate_configs
        ]
        self.balance_weights = parse_balance_loss(config.balance_loss)

    def reset_parameters(self, seed: int, name: str) -> None:
        """Initialize all parameters from (seed, name), independently of the number of ranks."""
        for i, gate in enumerate([self.gate, *self.other_gates]):
            reset_gate(gate, seed, name, f"gate{i or ''}")
        self.experts.reset_parameters(seed, name)
        if self.beside is not None:
            self.beside.reset_parameters(seed, name)

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        *,
        time_first: bool = False,
        capacity_factor: float | Capacity | None = None,
        top_k: int | None = None,
        gate_index: int | None = None,
    ) -> tuple[Tensor, MoEOutput]:
        """Send every token of x through its experts; return outputs, balance losses and routing.

        Args:
            x: [..., D] in any float dtype; with `time_first` [time, batch, D]. The gate gets x in this
                dtype, and the experts get x in the dtype of their weights.
            padding_mask: bool, True for padding (the output of padding is 0). Its shape is x's without
                D, or [batch, time] with `time_first`.
            time_first: whether x is [time, batch, D], as in fairseq. In both layouts, slots are assigned
                in (sentence, time) order.
            capacity_factor: replaces the configured value. Give a number (0 for no limit) or a Capacity.
            top_k: replaces the configured value.
            gate_index: replaces the configured index of the gate that routes the tokens.

        Returns:
            The pair (y, output). y has the shape of x, except if experts return another last dimension.
            y has the dtype of the experts' weights, or autocast's dtype under autocast. output has the
            balance losses and the routing.

        Raises:
            ValueError: x, a mask or an override are invalid.
        """
        call = Call.of(
            x,
            self.config.model_dim,
            padding_mask,
            time_first,
            capacity_factor=capacity_factor,
            top_k=top_k,
            gate_index=gate_index,
        )
        x_TD = call.tokens(x)
        routing = self.routing_of(x_TD, call)
        y_TD = self.apply_routing(x_TD, routing)
        return y_TD.view(*call.shape, y_TD.shape[1]), self.balance(routing)

    def routing_of(self, x_TD: Tensor, call: Call) -> Routing:
        """Return the routing of a forward pass, from `router` if it is set, otherwise from `route`."""
        if self.router is None:
            return self.route(x_TD, call)
        return self.router.routing_of(self, x_TD, call)

    def route(self, x_TD: Tensor, call: Call) -> Routing:
        """Choose experts for every token. Routing needs neither the experts' weights nor other ranks."""
        index = self.config.gate_index if call.gate_index is None else call.gate_index
        gate, config = self.gate_at(index)
        bias_E = None if self.balance_bias is None else self.balance_bias.bias
        batch = call.micro_batch(config, self.training, bias_E)
        seen_TD = gate_input(x_TD, config, self.training)
        found = choose_from(gate, seen_TD, config, batch)
        passed_TD, clean_TE, chosen = found or (None, gate_logits(gate, seen_TD, config), None)
        logits_TE = noisy_logits(clean_TE, config, self.training)
        cmr_T1 = None if self.beside is None else self.beside.cmr_gate_of(x_TD)
        topology = self.topology if self.training else None
        gate_output = GateOutput(
            logits_TE=logits_TE, clean_TE=clean_TE, noise=config.noise_std,
            score_function=config.score_function, sentences=call.sentences, time_first=call.time_first,
            cmr_T1=cmr_T1, topology=topology, backend=config.backend,
            x_TD=None if chosen is None else seen_TD, passed_TD=passed_TD,
        )  # fmt: skip
        if self.topology.expert_group is None and are_few(logits_TE, config, batch):
            return decide_few(logits_TE, config, batch, gate_output)
        routing = decide(logits_TE, config, batch, gate_output, chosen)
        if self.training and call.is_new and self.balance_bias is not None:
            self.balance_bias.count(routing.assigned_KE)
        return routing

    def apply_routing(self, x_TD: Tensor, routing: Routing, local: bool = False) -> Tensor:
        """Send every token through its experts and return the outputs [T, D]. Collective across ranks.

        If `local` is set, each rank runs its own experts on all its rows, and sends no rows. All ranks must
        pass the same value.
        """
        experts, gate = self.experts, routing.gate
        if gate is not None and gate.passed_TD is not None and gate.x_TD is x_TD:
            x_TD = gate.passed_TD  # the gate's backward adds its gradient of x to that of the experts
        if not torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(experts.dtype)
        dispatcher = OwnExperts(experts, self.config) if local else self.dispatcher
        y_TD = dispatcher.apply(x_TD, routing, experts.weights)
        if self.beside is not None:
            cmr_T1 = None if gate is None else gate.cmr_T1
            y_TD = self.beside(x_TD, y_TD, routing.real_T, cmr_T1)
        return mask_outputs(y_TD, 1, self.config.fom, self.training)

    def balance(self, routing: Routing) -> MoEOutput:
        """Return the balance losses of a routing from `route`. Some losses run a collective."""
        output = MoEOutput(routing, self.balance_weights)
        if not can_defer(self.training):  # compute losses now, with gradients
            if self.beside is not None:
                output.cmr_sum  # noqa: B018
            if self.balance_weights:  # otherwise the loss is a constant, which may never be read
                output.balance_loss  # noqa: B018
        return output

    def follow(self, strategy: Strategy) -> None:
        """Use this execution strategy in later forward passes. All ranks must use the same strategy."""
        self.strategy = strategy

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher for the current topology, strategy and weights."""
        return choose_dispatcher(
            self.experts, self.config, self.topology, self.strategy, self.calls, self.timer, self.name
        )

    def time_exchanges(self) -> None:
        """Measure the time of all later all-to-all exchanges with `timer`."""
        self.timer = ExchangeTimer()

    @torch.no_grad()
    def run_without_tokens(self) -> None:
        """Join the collectives of other ranks' forward with zero tokens, without changing any state."""
        self.dispatcher.run_without_tokens(self.experts.weights)

    def gate_at(self, index: int) -> tuple[nn.Module, MoEConfig]:
        """Return the gate with this index and its configuration; raise ValueError for an invalid index."""
        count = len(self.gate_configs)
        if not (is_whole(index) and 0 <= index < count):
            raise ValueError(
                f"gate_index is {index!r} but there are {count} gates; choose from 0 to {count - 1}."
            )
        gate = self.gate if index == 0 else self.other_gates[index - 1]
        return gate, self.gate_configs[index]
