"""The balance loss in the criterion's loss: combined over layers, weighted, and fed back to them.

L MoE layers.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_tutel.ffn_step import MoEFeedForward, moe_layers
from fairseq_tutel.metrics import metric_names
from fairseq_tutel.run_config import root_of

logger = logging.getLogger(__name__)


@dataclass
class GateLossOptions(FairseqDataclass):
    """The criterion's part of the balance loss; which losses there are is the model's part."""

    moe_gate_loss_wt: float = field(
        default=0.01,
        metadata={"help": "weight of the balance loss per unit of sample size [default: 0.01]"},
    )
    moe_gate_loss_combine_method: ChoiceEnum(["average", "sum"]) = field(  # type: ignore[valid-type]
        default="average",
        metadata={"help": "how the layers' balance losses become one [default: average]"},
    )
    moe_gate_loss_transform: ChoiceEnum(["none", "neg_log"]) = field(  # type: ignore[valid-type]
        default="none",
        metadata={"help": "what is done to the combined loss: neg_log takes -log [default: none]"},
    )


class GateLossMixin:
    """Goes before a fairseq criterion: adds the balance loss, and logs it with the expert metrics."""

    gate_loss: GateLossOptions
    logs_load: bool = False

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Build the stock criterion and keep the balance options."""
        if not math.isfinite(cfg.moe_gate_loss_wt):
            raise ValueError(
                f"--moe-gate-loss-wt is {cfg.moe_gate_loss_wt}; give a finite number, 0 for no "
                "balance loss."
            )
        criterion = super().build_criterion(cfg, task)  # type: ignore[misc]
        criterion.gate_loss = cfg
        root = root_of(task)
        # One number per expert and layer: for programs to read, not for a progress bar.
        criterion.logs_load = root is not None and str(root.common.log_format) == "json"
        return criterion

    def forward(self, model: nn.Module, sample: Any, reduce: bool = True) -> Any:
        """Return (loss with the balance loss, sample size, logging output)."""
        loss, sample_size, log = super().forward(model, sample, reduce)  # type: ignore[misc]
        all_layers = moe_layers(model)
        if not all_layers:
            raise ValueError(
                f"--criterion {type(self).__name__} needs MoE layers, and the model has none; choose "
                "an architecture whose name begins with moe_, or the stock criterion."
            )
        log.setdefault("nll_loss", log["loss"])
        # Layerdrop may leave layers out; they have no balance loss in this micro-batch.
        layers = [layer for layer in all_layers if layer.seen]
        if self.logs_load:
            log.update(_load(all_layers))
        if not layers:
            log.update(_nothing_seen(all_layers))
            return loss, sample_size, log
        combined, leaves = self._combine(layers)
        log.update(_metrics(layers, combined.detach()))
        if not reduce:
            return loss, sample_size, log
        scale = sample_size * self.gate_loss.moe_gate_loss_wt
        shares = torch.autograd.grad(combined, leaves)
        loss = _AddGateLoss.apply(loss, combined.detach() * scale, scale, shares, layers)
        log["loss"] = log["loss"] + combined.detach() * scale
        return loss, sample_size, log

    def _combine(self, layers: list[MoEFeedForward]) -> tuple[Tensor, list[Tensor]]:
        """Return the combined loss as a function of detached leaves, one per layer."""
        with torch.enable_grad():
            leaves = [layer.record.balance_loss.requires_grad_() for layer in layers]
            combined = torch.stack(leaves).sum()
            if str(self.gate_loss.moe_gate_loss_combine_method) == "average":
                combined = combined / len(leaves)
            has_losses = any(layer.balance_weights for layer in layers)
            if has_losses and str(self.gate_loss.moe_gate_loss_transform) == "neg_log":
                # A batch without tokens has loss 0; the clamp keeps its (ignored) logarithm finite.
                combined = -combined.clamp_min(torch.finfo(combined.dtype).tiny).log()
        return combined, leaves

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the stock metrics, the balance loss and the expert metrics."""
        super().reduce_metrics(logging_outputs)  # type: ignore[misc]
        reduce_gate_metrics(logging_outputs)


class _AddGateLoss(torch.autograd.Function):
    """loss + value; backward hands every layer the coefficient of its balance loss.

    This node is the first of a backward, the layers' own come later, so they find it set. It is
    cleared when the backward ends: a backward without a criterion's loss then adds nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        value: Tensor,
        scale: Any,
        shares: tuple[Tensor, ...],
        layers: list[MoEFeedForward],
    ) -> Tensor:
        ctx.scale, ctx.shares, ctx.layers = scale, shares, layers
        return loss + value.to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        layers = ctx.layers

        def clear() -> None:
            for layer in layers:
                layer.coefficient = None

        for layer, share in zip(layers, ctx.shares, strict=True):
            layer.coefficient = dloss.to(share.dtype) * ctx.scale * share
        torch.autograd.Variable._execution_engine.queue_callback(clear)
        return dloss, None, None, None, None


PREFIX = "moe_metric_"


def _metrics(layers: list[MoEFeedForward], combined: Tensor) -> dict[str, Any]:
    """Return the sums to log: every metric averaged over layers, times the real tokens."""
    records = [layer.record for layer in layers]
    tokens = torch.stack([record.num_tokens for record in records]).float().mean()
    values: dict[str, Any] = {"moe_gate_loss": combined}
    for name in records[0].losses:
        values[f"moe_{name}_loss"] = _mean([record.losses[name] for record in records])
    for name in dict.fromkeys(name for record in records for name in record.metrics):
        values[name] = _mean([r.metrics[name] for r in records if name in r.metrics])
    log = {PREFIX + name: value.float() * tokens for name, value in values.items()}
    log["moe_tokens"] = tokens
    log["moe_micro_batches"] = 1
    for name, ms in _exchange_times(layers).items():
        log[name] = ms
    return log


LOAD_PREFIX = "moe_load_"


def _load(layers: list[MoEFeedForward]) -> dict[str, Tensor]:
    """Return how many (token, choice) pairs chose each expert [E], for every layer."""
    return {
        LOAD_PREFIX + layer.label: layer.record.assigned_E if layer.seen else _no_load(layer)
        for layer in layers
    }


def _no_load(layer: MoEFeedForward) -> Tensor:
    device = next(layer.parameters()).device
    return torch.zeros(layer.config.num_experts, dtype=torch.int64, device=device)


def _nothing_seen(layers: list[MoEFeedForward]) -> dict[str, Any]:
    """Return a log of the same keys, which ranks must agree on, that weighs nothing."""
    names = ["moe_gate_loss"]
    for layer in layers:
        names += [f"moe_{name}_loss" for name in layer.balance_weights]
        names += metric_names(layer.config.top_k)
    keys = [PREFIX + name for name in dict.fromkeys(names)] + ["moe_tokens", "moe_micro_batches"]
    return dict.fromkeys([*keys, *_exchange_times(layers)], 0)


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack([value.float() for value in values]).mean()


def _exchange_times(layers: list[MoEFeedForward]) -> dict[str, float]:
    times: dict[str, float] = {}
    for layer in layers:
        if layer.timer is not None:
            for name, ms in layer.timer.read_and_reset().items():
                times[name] = times.get(name, 0.0) + ms
    return times


def reduce_gate_metrics(logging_outputs: list[dict[str, Any]]) -> None:
    """Log what `_metrics` summed, weighted by real tokens over micro-batches and ranks."""
    tokens = sum(log.get("moe_tokens", 0) for log in logging_outputs)
    names = dict.fromkeys(
        name for log in logging_outputs for name in log if name.startswith(PREFIX)
    )
    for name in names:
        total = sum(log.get(name, 0) for log in logging_outputs)
        metrics.log_scalar(
            name.removeprefix(PREFIX), total / max(tokens, 1e-9), max(tokens, 1e-9), round=4
        )
    for name in dict.fromkeys(
        n for log in logging_outputs for n in log if n.startswith(LOAD_PREFIX)
    ):
        _log_load(name, sum(log[name] for log in logging_outputs if name in log))
    batches = sum(log.get("moe_micro_batches", 0) for log in logging_outputs)
    for name in ("all_to_all_cpu_time_ms", "all_to_all_cuda_time_ms"):
        if any(name in log for log in logging_outputs):
            total = sum(log.get(name, 0) for log in logging_outputs)
            metrics.log_scalar(name, total / max(batches, 1), round=3)


def _log_load(name: str, assigned_E: Tensor) -> None:
    """Log a layer's load as a list: every expert's share, 1 when all have the same.

    A list can only be derived: fairseq's meters round numbers, and keep no class of ours in a file.
    """

    def load(meters: Any) -> list[float]:
        mean_E = meters["_" + name].avg
        return [round(x, 3) for x in (mean_E * len(mean_E) / mean_E.sum().clamp_min(1)).tolist()]

    metrics.log_scalar("_" + name, assigned_E.double(), 1)
    metrics.log_derived(name, load)
