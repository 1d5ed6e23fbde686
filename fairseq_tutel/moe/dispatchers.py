"""Dispatchers send the tokens of a layer to their experts and return the results.

- `Local`: all experts are on this rank.
- `Gathering`: every rank gathers the weights of all experts for one forward (adaptive_r = 0).
- `Exchange`: rows are sent to the ranks that own their experts.
- `OwnExperts`: rows are not sent, and this rank's experts replace others, for --moe-local-drop in training.

Every class has these members:

- `apply(x_TD, routing, weights)` returns each token's weighted sum of its experts' outputs, [T, D].
- `run_without_tokens` joins the collectives of other ranks' `apply` with zero tokens.

T tokens, D model_dim, R rows.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.moe.adaptive import nearest_degree, weights_of
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.decode import run_few, runs_few
from fairseq_tutel.moe.dispatch import combine, dispatch
from fairseq_tutel.moe.expert_stack import ExpertStack, Weights
from fairseq_tutel.moe.routing import Routing, padded
from fairseq_tutel.option import require
from fairseq_tutel.parallel import exchange
from fairseq_tutel.parallel.call_id import CallCounter, CallId
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.regroup import regroup_maps
from fairseq_tutel.parallel.strategy import Strategy
from fairseq_tutel.parallel.transfer import ExchangeTimer


@dataclass(eq=False)
class Local:
    """The dispatcher of a layer whose experts are all on this rank; it sends no rows to other ranks."""

    experts: ExpertStack
    config: MoEConfig

    def apply(self, x_TD: Tensor, routing: Routing, weights: Weights) -> Tensor:
        """Run the experts on this rank and return the layer output y_TD."""
        experts, config = self.experts, self.config
        if not config.prescore and runs_few(experts, routing):
            return run_few(experts, x_TD, routing, weights)
        if not config.prescore and experts.can_fuse:
            return experts.run_fused(x_TD, routing, weights)
        rows_RD = dispatch(x_TD, routing, config.backend, config.prescore)
        rows_RD = experts.call(rows_RD, routing.groups, weights)
        return combine(rows_RD, routing, config.backend, config.prescore)

    def run_without_tokens(self, weights: Weights) -> None:
        """Do nothing, because this layer has no collectives that other ranks could wait for."""


@dataclass(eq=False)
class Gathering(Local):
    """A dispatcher that gathers all experts on every rank for one forward pass, and sends no rows."""

    topology: Topology
    calls: CallCounter

    def apply(self, x_TD: Tensor, routing: Routing, weights: Weights) -> Tensor:
        """Gather all experts, run them on this rank's tokens and return the layer output y_TD."""
        return super().apply(x_TD, routing, self._gathered(x_TD.device))

    def run_without_tokens(self, weights: Weights) -> None:
        """Join the other ranks' all-gather of the expert weights, without tokens of this rank."""
        self._gathered(self.experts.device)

    def _gathered(self, device: torch.device) -> Weights:
        call_id = CallId(self.calls, self.experts.training)
        return weights_of(self.experts, self.topology, 0, device, call_id)


@dataclass(eq=False)
class Exchange:
    """A dispatcher that sends rows to the ranks that own their experts."""

    experts: ExpertStack
    config: MoEConfig
    topology: Topology
    calls: CallCounter
    options: exchange.ExchangeOptions

    def apply(self, x_TD: Tensor, routing: Routing, weights: Weights) -> Tensor:
        """Send rows to the ranks of their experts, receive the outputs and return the layer output y_TD."""
        config, options = self.config, self.options
        call_id = CallId(self.calls, self.experts.training)
        if options.padded:
            capacity = exchange.agreed_capacity(routing.counts_E, options, call_id)
            routing = padded(routing, capacity)
        weights = self._gathered(weights, x_TD.device)
        rows_RD = dispatch(x_TD, routing, config.backend, config.prescore)
        expert_fn = partial(self.experts.run_unsorted, weights=weights)
        rows_RD = exchange.exchange_rows(rows_RD, routing.counts_E, options, expert_fn, call_id)
        return combine(rows_RD, routing, config.backend, config.prescore)

    def run_without_tokens(self, weights: Weights) -> None:
        """Join the exchange with zero tokens and run this rank's experts for the other ranks."""
        options = dataclasses.replace(self.options, timer=None)
        call_id = CallId(self.calls, self.experts.training)
        device = self.experts.device
        counts_E = torch.zeros(self.config.num_experts, device=device, dtype=torch.int64)
        capacity = exchange.agreed_capacity(counts_E, options, call_id) if options.padded else 0
        shape = len(counts_E) * capacity, self.config.model_dim
        rows_RD = torch.zeros(shape, device=device, dtype=self.experts.dtype)
        weights = self._gathered(weights, device)
        expert_fn = partial(self.experts.run_unsorted, weights=weights)
        exchange.exchange_rows(rows_RD, counts_E, options, expert_fn, call_id)

    def _gathered(self, weights: Weights, device: torch.device) -> Weights:
        """Return the expert weights, after gathering other ranks' shards of these experts if necessary."""
        if not weights.are_own:
            return weights
        degree = self.options.strategy.adaptive_r
        return weights_of(self.experts, self.topology, degree, device)


@dataclass(eq=False)
class OwnExperts:
    """A dispatcher that processes all rows of a rank with its own experts and sends none.

    The i-th expert of every rank is replaced by this rank's i-th expert. Weights and dropping do not
    change. The experts must not be split into shards.

    Source: Liu et al. 2022 (Gating Dropout), section 3, and Meta's nllb branch.
    """

    experts: ExpertStack
    config: MoEConfig

    def apply(self, x_TD: Tensor, routing: Routing, weights: Weights) -> Tensor:
        """Run this rank's experts on all rows and return the layer output y_TD."""
        experts, config = self.experts, self.config
        require(
            experts.part.slices == 1,
            f"local is set, but {experts.part.slices} ranks share each expert; give complete experts.",
        )
        counts_Pe = routing.counts_E.view(-1, experts.num_local)
        groups = Groups.of_tensor(counts_Pe.sum(0))
        rows_RD = dispatch(x_TD, routing, config.backend, config.prescore)[: sum(groups.host)]
        to_expert, to_source = regroup_maps(counts_Pe, len(rows_RD))
        rows_RD = experts.run_unsorted(rows_RD, groups, to_expert, to_source, weights)
        return combine(rows_RD, routing, config.backend, config.prescore)


Dispatcher = Local | Exchange


def choose_dispatcher(
    experts: ExpertStack,
    config: MoEConfig,
    topology: Topology,
    strategy: Strategy,
    calls: CallCounter | None,
    timer: ExchangeTimer | None,
    name: str,
) -> Dispatcher:
    """Return the dispatcher (local, gathering or exchange) for a layer's topology, strategy and weights."""
    group = topology.expert_group
    if group is None or calls is None or experts.weights.of_all:
        return Local(experts, config)
    slices = topology.slices(config.num_experts)
    degree = nearest_degree(strategy.adaptive_r, slices, config.hidden_layer_norm)
    if not experts.weights.are_own:  # offloaded weights cannot be gathered
        degree = max(1, degree)
    if degree == 0:
        return Gathering(experts, config, topology, calls)
    options = exchange.ExchangeOptions(
        group=group, grid=topology.grid, strategy=dataclasses.replace(strategy, adaptive_r=degree),
        slices=slices, padded=config.exchange == "padded", transfer_dtype=config.a2a_dtype,
        timer=timer, name=name,
    )  # fmt: skip
    return Exchange(experts, config, topology, calls, options)
