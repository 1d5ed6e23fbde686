"""The layer: gate, route, dispatch, exchange (experts), combine.

T tokens, D model_dim, E experts (e local), K top_k, R rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_tutel import exchange, exploration, losses, routing
from fairseq_tutel.comm.all_to_all import ExchangeTimer
from fairseq_tutel.comm.gradients import mark_expert
from fairseq_tutel.comm.topology import Topology
from fairseq_tutel.config import MoEConfig, parse_balance_loss
from fairseq_tutel.dispatch import combine, dispatch
from fairseq_tutel.experts import Experts, seeded_generator
from fairseq_tutel.gates import build_gate


@dataclass(frozen=True, kw_only=True)
class MoEOutput:
    """What a layer returns beside y.

    Attributes:
        balance_loss: [] differentiable scalar, the weighted sum of `losses`; 0 where there are none.
        losses: every balance loss by name, unweighted.
        routing: the decision of this forward.
    """

    balance_loss: Tensor
    losses: dict[str, Tensor]
    routing: routing.Routing


class MoELayer(nn.Module):
    """A mixture of experts in place of a feed-forward layer.

    1. gate: x_TD -> logits_TE
    2. route: logits_TE -> Routing (experts, slots, drops, row maps)
    3. dispatch: x_TD -> rows_RD, expert-major
    4. exchange: rows cross to the ranks that own their experts, run, and come back
    5. combine: rows_RD -> y_TD, weighted

    Args:
        config: what to compute and how.
        topology: where the experts live; None means all of them here.
        seed: seeds the layer's own generators; None draws one from torch's global generator, which
            must then be seeded alike on every rank.
        name: tells layers of one seed apart.
    """

    def __init__(
        self,
        config: MoEConfig,
        topology: Topology | None = None,
        *,
        seed: int | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        self.config = config
        self.topology = topology or Topology()
        local = self.topology.local_experts(config.num_experts)
        self.gate = build_gate(config)
        self.experts = Experts(config, len(local), local.start)
        if self.topology.expert_parallel_size > 1:
            for parameter in self.experts.expert_parameters().values():
                mark_expert(parameter)
        self.timer: ExchangeTimer | None = None
        self.balance_weights = parse_balance_loss(config.balance_loss)
        self.reset_parameters(int(torch.randint(2**62, ())) if seed is None else seed, name)

    def reset_parameters(self, seed: int, name: str) -> None:
        """Initialise gate and experts from generators seeded by (seed, name): alike for every W."""
        self.gate.reset_parameters(seeded_generator(seed, name, -1, "gate"))  # type: ignore[operator]
        self.experts.reset_parameters(seed, name)

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        *,
        time_first: bool = False,
        capacity_factor: float | None = None,
        top_k: int | None = None,
    ) -> tuple[Tensor, MoEOutput]:
        """Route every token of x through its experts.

        Args:
            x: [..., D]; with `time_first` [time, batch, D].
            padding_mask: bool, True for tokens to leave out (their output is 0): the shape of x
                without D, or [batch, time] with `time_first`.
            time_first: x is laid out time first, as fairseq does; dropping still goes by
                (sentence, time).
            capacity_factor: overrides the configured one for this call; 0 drops nothing.
            top_k: overrides the configured one for this call.

        Returns:
            y: the shape and dtype of x (autocast's dtype under autocast).
            output: balance losses and routing.
        """
        if capacity_factor is None:
            training, config = self.training, self.config
            capacity_factor = config.capacity_factor if training else config.eval_capacity_factor
        x_TD = x.reshape(-1, x.shape[-1])
        if padding_mask is not None:
            _check_mask(padding_mask, x, time_first)
            padding_mask = (padding_mask.t() if time_first else padding_mask).reshape(-1)

        seen_TD = exploration.gate_input(x_TD, self.config, self.training)
        logits_TE = exploration.noisy_logits(self.gate(seen_TD), self.config, self.training)
        assignment = routing.assign(
            logits_TE,
            self.config.top_k if top_k is None else top_k,
            capacity_factor,
            drop_policy=self.config.drop_policy,
            training=self.training,
            real_T=None if padding_mask is None else ~padding_mask,
            time_first=(x.shape[0], x.shape[1]) if time_first else None,
        )
        plan = self._plan()
        decision = routing.lay_out(assignment, self._buffer_capacity(assignment, plan))
        rows_RD = dispatch(x_TD, decision, self.config.backend)
        rows_RD = exchange.run(rows_RD, decision.counts_E, self.experts, plan)
        y_TD = combine(rows_RD, decision, self.config.backend)
        return y_TD.view(x.shape), self._output(decision, logits_TE)

    def _plan(self) -> exchange.ExchangePlan:
        # Experts that were gathered everywhere need nobody else.
        here = self.experts.everywhere is not None
        return exchange.ExchangePlan(
            group=None if here else self.topology.expert_group,
            padded=self.config.exchange == "padded",
            timer=self.timer,
        )

    @staticmethod
    def _buffer_capacity(assignment: routing.Assignment, plan: exchange.ExchangePlan) -> int | None:
        if plan.group is None or not plan.padded:
            return None
        return exchange.agreed_capacity(assignment.counts_E, plan)

    def _output(self, decision: routing.Routing, logits_TE: Tensor) -> MoEOutput:
        named = losses.balance_losses(self.balance_weights, decision, logits_TE)
        total = torch.zeros((), device=decision.probs_TE.device, dtype=decision.probs_TE.dtype)
        for name, loss in named.items():
            total = total + self.balance_weights[name] * loss
        return MoEOutput(balance_loss=total, losses=named, routing=decision)


def _check_mask(padding_mask: Tensor, x: Tensor, time_first: bool) -> None:
    expected = (x.shape[1], x.shape[0]) if time_first else tuple(x.shape[:-1])
    if tuple(padding_mask.shape) != expected or padding_mask.dtype != torch.bool:
        raise ValueError(
            f"padding_mask is {padding_mask.dtype} of shape {tuple(padding_mask.shape)}; give torch.bool "
            f"of shape {expected}, True for padding."
        )
