"""Adds the weighted balance loss and the budget loss of all MoE layers to a criterion's loss.

The budget loss (of NLLB's CMR layers) trains the mean weight of the routed experts towards a given value.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_tutel.kernels.first_order import first_order
from fairseq_tutel.option import read, refuse_bad_values
from fairseq_tutel.plugin.criterions.expert_log import expert_log, reduce_expert_log, without_experts
from fairseq_tutel.plugin.feed_forward import (
    BALANCE,
    BUDGET,
    Coefficients,
    MoEFeedForward,
    contexts_of,
    moe_layers,
)
from fairseq_tutel.plugin.options import CriterionConfig
from fairseq_tutel.plugin.run_state import root_of


class GateLossMixin:
    """Mixin that adds the balance loss to a fairseq criterion, and logs it with the expert metrics."""

    gate_loss: Any  # The type of gate_loss is GateLossOptions.
    logs_lists: bool = False
    keeps_loss: bool = True  # Whether to log the loss without balance loss as nll_loss.

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Build the fairseq criterion with the options of the balance loss."""
        refuse_bad_values(read(CriterionConfig, cfg))
        if not getattr(task, "_has_experts", False):
            name = getattr(cfg, "_name", None) or cfg.criterion
            raise ValueError(
                f"--criterion {name} needs MoE layers, but the model has none; choose an architecture "
                "whose name begins with moe_, or the criterion without moe_ in its name."
            )
        criterion = super().build_criterion(cfg, task)  # type: ignore[misc]
        root = root_of(task)
        # Lists over layers and experts are logged in JSON only, not in a progress bar.
        criterion.logs_lists = root is not None and str(root.common.log_format) == "json"
        criterion.gate_loss = cfg
        return criterion

    def forward(self, model: nn.Module, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss with the balance loss added, the sample size and the logging output.

        The balance loss is not added to a loss that has one element per token.
        """
        loss, sample_size, log = super().forward(model, sample, *args, **kwargs)  # type: ignore[misc]
        all_layers = moe_layers(model)
        if self.keeps_loss:
            log.setdefault("nll_loss", log["loss"])
        # A layer that LayerDrop skips has no balance loss in this micro-batch.
        layers = [layer for layer in all_layers if layer.seen]
        terms = self._terms(layers, all_layers[0].config.cmr, loss.new_zeros(()))
        combined = {term.name: term.value.detach() for term in terms}
        log |= expert_log(all_layers, combined, self.logs_lists)
        log = {key: _logged(value) for key, value in log.items()}
        if not layers or loss.numel() > 1:  # The criterion adaptive_loss returns its sum in shape [1].
            return loss, sample_size, log
        for term in terms:
            scale = sample_size * term.weight
            grads = torch.autograd.grad(term.value, term.leaves)
            shares = {(layer, term.kind): grad for layer, grad in zip(layers, grads, strict=True)}
            loss = _AddGateLoss.apply(loss, term.value.detach() * scale, scale, shares)
            log["loss"] = log["loss"] + term.value.detach() * scale
        return loss, sample_size, log

    def _terms(self, layers: list[MoEFeedForward], has_cmr: bool, nothing: Tensor) -> list["_Term"]:
        """Return the balance loss and, with `has_cmr`, the budget loss; both are 0 if no layer ran."""
        options, empty = self.gate_loss, (nothing, list[Tensor]())
        balance = self._combine(layers) if layers else empty
        terms = [_Term("moe_gate_loss", BALANCE, options.moe_gate_loss_wt, *balance)]
        if has_cmr:
            budget = self._budget(layers) if layers else empty
            terms.append(_Term("cmr_gate_loss", BUDGET, options.cmr_gate_loss_wt, *budget))
        return terms

    def _budget(self, layers: list[MoEFeedForward]) -> tuple[Tensor, list[Tensor]]:
        """Return the budget loss |mean CMR gate - p|, and its detached inputs; p is --cmr-gate-loss-p."""
        with torch.enable_grad():
            leaves = [layer.record.cmr_sum.requires_grad_() for layer in layers]  # type: ignore[union-attr]
            tokens = torch.stack([layer.record.tally.num_tokens for layer in layers]).sum()
            mean = torch.stack(leaves).sum() / tokens.clamp_min(1)
            return (mean - self.gate_loss.cmr_gate_loss_p).abs(), leaves

    def _combine(self, layers: list[MoEFeedForward]) -> tuple[Tensor, list[Tensor]]:
        """Return the balance loss combined over layers, and its detached inputs, one per layer."""
        with torch.enable_grad():
            leaves = [layer.record.balance_loss.requires_grad_() for layer in layers]
            combined = torch.stack(leaves).sum()
            if str(self.gate_loss.moe_gate_loss_combine_method) == "average":
                combined = combined / len(leaves)
            has_losses = any(layer.balance_weights for layer in layers)
            if has_losses and str(self.gate_loss.moe_gate_loss_transform) == "neg_log":
                # Without tokens, the balance loss is 0; the clamp keeps its logarithm finite.
                combined = -combined.clamp_min(torch.finfo(combined.dtype).tiny).log()
        return combined, leaves

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the fairseq criterion's metrics, the balance loss and the expert metrics."""
        super().reduce_metrics(without_experts(logging_outputs))  # type: ignore[misc]
        reduce_expert_log(logging_outputs)


def _logged(value: Any) -> Any:
    """Return a logged value without its autograd graph, because fairseq's meters keep logged values.

    Half-precision values are converted to fp32, because half-precision sums over micro-batches are inexact.
    """
    if not torch.is_tensor(value):
        return value
    return value.detach().float() if value.dtype in (torch.float16, torch.bfloat16) else value.detach()


class _Term(NamedTuple):
    """A loss that is combined over MoE layers and added to the loss of a criterion."""

    name: str  # The name of the loss in the log.
    kind: str  # The kind is BALANCE or BUDGET.
    weight: float
    value: Tensor
    leaves: list[Tensor]  # The detached inputs of the loss, one tensor per layer.


class _AddGateLoss(torch.autograd.Function):
    """Autograd function that adds a loss of the MoE layers; backward sets the coefficient of each layer.

    In a backward pass, the node of _AddGateLoss runs before the nodes of the MoE layers. The coefficients
    are removed after the backward pass, so they cannot change a later backward pass without this node.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, scale: Any, shares: Coefficients) -> Tensor:
        ctx.scale, ctx.shares = scale, shares
        return loss + value.to(loss.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        coefficients = {
            key: dloss.to(share.dtype).sum() * ctx.scale * share for key, share in ctx.shares.items()
        }
        for context in contexts_of(layer for layer, _ in ctx.shares):
            context.begin_backward(coefficients)
            torch.autograd.Variable._execution_engine.queue_callback(context.end_backward)
        return dloss, None, None, None
