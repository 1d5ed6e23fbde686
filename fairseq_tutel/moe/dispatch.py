"""Dispatch, combine, and the dispatchers that send a layer's tokens to experts and back.

Dispatch maps x_TD to rows_RD, and combine maps rows_RD to y_TD. Dispatch's backward is like combine's
forward, and vice versa. All four passes gather rows by index maps, without scatters or atomics. Equal
inputs therefore give bit-identical results.

- `Local` is the dispatcher if all experts are on this rank.
- `Gathering` gathers the weights of all experts on every rank for one forward pass (adaptive_r = 0).
- `Exchange` sends rows to the ranks that own their experts.
- `OwnExperts` sends no rows: this rank's experts replace those of other ranks (--moe-local-drop).

Every dispatcher has these members:

- `apply(x_TD, routing, weights)` returns each token's weighted sum of its experts' outputs, [T, D].
- `run_without_tokens` joins the collectives of `apply` on other ranks with zero tokens.

Shapes use T for tokens, D for model_dim, K for top_k and R for rows.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fairseq_tutel import kernels
from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.kernels.groups import Groups
from fairseq_tutel.kernels.reference_route import token_of
from fairseq_tutel.moe.adaptive import nearest_degree, weights_of
from fairseq_tutel.moe.config import MoEConfig
from fairseq_tutel.moe.decode import run_few, runs_few
from fairseq_tutel.moe.expert_stack import ExpertStack, Weights
from fairseq_tutel.moe.routing import Routing, padded
from fairseq_tutel.option import require
from fairseq_tutel.parallel import exchange
from fairseq_tutel.parallel.call_id import CallCounter, CallId
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.parallel.regroup import regroup_maps
from fairseq_tutel.parallel.strategy import Strategy
from fairseq_tutel.parallel.transfer import ExchangeTimer


def dispatch(x_TD: Tensor, routing: Routing, backend: str = "auto", prescore: bool = False) -> Tensor:
    """Copy tokens to rows sorted by expert. With `prescore`, multiply each row by its gate weight.

    Args:
        x_TD: the tokens, in any float dtype, differentiable.
        routing: the rows of each token.
        backend: "reference" (plain torch), "triton", or "auto" for the best backend of the device.
        prescore: whether to multiply rows by gate weights; `combine` with `prescore` then only adds rows.

    Returns:
        rows_RD in the dtype of x_TD. Rows without a token are 0.

    Example:
        >>> routing = ft.route(torch.tensor([[0.0, 9.0], [9.0, 0.0]]), top_k=1)
        >>> ft.dispatch(torch.tensor([[1.0], [2.0]]), routing).tolist()
        [[2.0], [1.0]]
    """
    ops = kernels.ops(backend, x_TD.device)
    weights_TK = routing.weights_TK if prescore else None
    return _Dispatch.apply(x_TD, weights_TK, routing.row_of_TK, routing.source_of_R, ops)


def combine(rows_RD: Tensor, routing: Routing, backend: str = "auto", prescore: bool = False) -> Tensor:
    """Return each token's sum of expert outputs, weighted unless `prescore` is set.

    Args:
        rows_RD: the experts' outputs, in any float dtype, differentiable. It may have fewer than R rows,
            because unused rows at the end can be cut.
        routing: the rows and weights of each token.
        backend: as in `dispatch`.
        prescore: whether `dispatch` has multiplied the rows by the gate weights.

    Returns:
        y_TD in the dtype of rows_RD; 0 for tokens without rows.

    Example:
        >>> routing = ft.route(torch.zeros(3, 4), top_k=2)
        >>> x = torch.randn(3, 8)
        >>> torch.allclose(ft.combine(ft.dispatch(x, routing), routing), x)  # the weights sum to 1
        True
    """
    ops = kernels.ops(backend, rows_RD.device)
    source_of_R = routing.source_of_R[: rows_RD.shape[0]]
    weights_TK = None if prescore else routing.weights_TK
    return _Combine.apply(rows_RD, weights_TK, routing.row_of_TK, source_of_R, ops)


class _Dispatch(torch.autograd.Function):
    """Copy a token to each row: rows[r] = x[token of r], multiplied by gate weights if they are given."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor | None, row_of_TK: Tensor, source_of_R: Tensor, ops: Any
    ) -> Tensor:
        ctx.ops, token_of_R = ops, token_of(source_of_R, row_of_TK.shape[1])
        if weights_TK is None:
            ctx.save_for_backward(None, None, row_of_TK)
            return ops.gather_rows(x_TD, token_of_R)
        ctx.save_for_backward(x_TD, weights_TK, row_of_TK)
        scale_R = ops.gather_rows(weights_TK.reshape(-1, 1), source_of_R).squeeze(1)
        return ops.gather_rows(x_TD, token_of_R, scale_R)

    @staticmethod
    @first_order
    def backward(ctx: Any, drows_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, row_of_TK = ctx.saved_tensors
        drows_RD = drows_RD.contiguous()
        if weights_TK is None:
            return ctx.ops.gather_sum(drows_RD, row_of_TK), None, None, None, None
        dx_TD = ctx.ops.gather_sum(drows_RD, row_of_TK, weights_TK)
        dweights_TK = ctx.ops.gather_dot(drows_RD, row_of_TK, x_TD).to(weights_TK.dtype)
        return dx_TD, dweights_TK, None, None, None


class _Combine(torch.autograd.Function):
    """Sum each token's rows into y[t], weighted if weights are given (the adjoint of `_Dispatch`)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_TK: Tensor | None,
        row_of_TK: Tensor,
        source_of_R: Tensor,
        ops: Any,
    ) -> Tensor:
        ctx.ops, ctx.top_k = ops, row_of_TK.shape[1]
        if weights_TK is None:
            ctx.save_for_backward(None, None, None, source_of_R)
            return ops.gather_sum(rows_RD, row_of_TK)
        ctx.save_for_backward(rows_RD, weights_TK, row_of_TK, source_of_R)
        return ops.gather_sum(rows_RD, row_of_TK, weights_TK)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, weights_TK, row_of_TK, source_of_R = ctx.saved_tensors
        dy_TD, token_of_R = dy_TD.contiguous(), token_of(source_of_R, ctx.top_k)
        if weights_TK is None:
            return ctx.ops.gather_rows(dy_TD, token_of_R), None, None, None, None
        scale_R = ctx.ops.gather_rows(weights_TK.reshape(-1, 1), source_of_R).squeeze(1)
        drows_RD = ctx.ops.gather_rows(dy_TD, token_of_R, scale_R)
        dweights_TK = ctx.ops.gather_dot(rows_RD, row_of_TK, dy_TD).to(weights_TK.dtype)
        return drows_RD, dweights_TK, None, None, None


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
        rows_RD = experts(rows_RD, routing.groups, weights)
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
    """A dispatcher that processes all rows of a rank with the experts of this rank, and sends no rows.

    This rank's i-th expert computes the rows of the i-th expert of every rank. Gate weights and dropped
    assignments do not change. The experts must not be split into shards over ranks.

    The method is Gating Dropout (Liu et al. 2022, section 3), also in Meta's nllb branch.
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
    if not experts.weights.are_own:  # Offloaded weights cannot be gathered.
        degree = max(1, degree)
    if degree == 0:
        return Gathering(experts, config, topology, calls)
    options = exchange.ExchangeOptions(
        group=group, grid=topology.grid, strategy=dataclasses.replace(strategy, adaptive_r=degree),
        slices=slices, padded=config.exchange == "padded", transfer_dtype=config.a2a_dtype,
        timer=timer, name=name,
    )  # fmt: skip
    return Exchange(experts, config, topology, calls, options)
