"""Logs the experts' metrics: averages over layers and, if enabled, those of each layer and expert.

fairseq sums logged values by key, over micro-batches and ranks, and passes the sums to a class method
without the model. So one key holds a vector of all numbers, and is itself their `Layout` as JSON. A vector
needs one addition and one host read, however many numbers it has.

L MoE layers, E experts, N metrics of a layer.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from fairseq.logging import metrics
from torch import Tensor

from fairseq_tutel.moe.metrics import METRICS, metric_names, metric_rows
from fairseq_tutel.moe.slots import capacity_of
from fairseq_tutel.plugin.feed_forward import MoEFeedForward

PREFIX = "moe_numbers "
# Prefixes of the keys that `expert_log` returns.
OURS = ("moe_", "all_to_all_")
# Priority of the numbers in a log line: behind fairseq's own.
PRIORITY = 900


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The meaning of a micro-batch's numbers. Averages are multiplied by their real tokens.

    In this order:

    - the tokens
    - averages over layers: the losses, then the N metrics
    - for each logged layer its metrics and its tokens
    - assignments of each expert of the logged layers
    - dropped assignments of each of these experts
    """

    losses: tuple[str, ...]
    top_k: int  # K, which determines the names of metrics
    layers: tuple[str, ...]  # labels of the logged layers
    experts: tuple[int, ...]  # E of each logged layer
    limited: tuple[bool, ...]  # whether an expert can be full, for each logged layer
    lists: bool  # whether they are logged as lists
    scalars: bool  # whether they are logged as scalars

    @property
    def averages(self) -> list[str]:
        """Names of the averages over layers."""
        return [*self.losses, *metric_names(self.top_k)]


@cache
def key_of(layout: Layout) -> str:
    """Return the key of a layout, equal on all ranks."""
    return PREFIX + json.dumps(asdict(layout))


@cache
def layout_of(key: str) -> Layout:
    """Return the layout of a key."""
    fields: dict[str, Any] = json.loads(key.removeprefix(PREFIX))
    made: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Layout(**made)


def expert_log(
    layers: list[MoEFeedForward], combined: Tensor, *, lists: bool, scalars: bool
) -> dict[str, Any]:
    """Return the entries of a micro-batch in the logging output.

    A layer that layerdrop skipped has no weight, nor has a batch without real tokens.

    Args:
        layers: all MoE layers of the model, in its order.
        combined: [] their balance loss, on their device.
        lists: whether to log the numbers of each layer and expert as lists.
        scalars: whether to log them as scalars.
    """
    each = layers if lists or scalars else []
    layout = Layout(
        losses=("moe_gate_loss", *(f"moe_{name}_loss" for name in layers[0].balance_weights)),
        top_k=layers[0].config.top_k,
        layers=tuple(layer.label for layer in each),
        experts=tuple(layer.config.num_experts for layer in each),
        limited=tuple(_can_be_full(layer) for layer in each),
        lists=lists,
        scalars=scalars,
    )
    seen = [layer for layer in layers if layer.seen]
    if seen:
        numbers = _numbers(seen, combined, each)
    else:
        numbers = torch.zeros(_length(layout), device=combined.device)
    log: dict[str, Any] = {key_of(layout): numbers, "moe_micro_batches": int(bool(seen))}
    return log | _exchange_times(layers)


def without_experts(logging_outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return logging outputs without the entries of `expert_log`; some criterions log all they find."""
    return [
        {key: value for key, value in log.items() if not key.startswith(OURS)} for log in logging_outputs
    ]


def reduce_expert_log(logging_outputs: list[dict[str, Any]]) -> None:
    """Log the averages over micro-batches and ranks, weighted by real tokens."""
    keys = dict.fromkeys(k for log in logging_outputs for k in log if k.startswith(PREFIX))
    for index, key in enumerate(keys):  # models for several language pairs have several keys
        numbers = sum(log[key] for log in logging_outputs if key in log)
        _log_numbers(layout_of(key), numbers.cpu().double(), index)  # the only host read
    batches = sum(log.get("moe_micro_batches", 0) for log in logging_outputs)
    for name in ("all_to_all_cpu_time_ms", "all_to_all_cuda_time_ms"):
        if any(name in log for log in logging_outputs):
            total = sum(log.get(name, 0) for log in logging_outputs)
            metrics.log_scalar(name, total / max(batches, 1), priority=PRIORITY, round=3)


def _numbers(seen: list[MoEFeedForward], combined: Tensor, each: list[MoEFeedForward]) -> Tensor:
    """Return the numbers of a layout; `seen` are the layers that had a forward pass."""
    records = [layer.record for layer in seen]
    rows_LN, tokens_L1 = metric_rows([record.tally for record in records])
    of_losses = [loss for record in records for loss in record.losses.values()]
    losses_LM = torch.stack(of_losses).view(len(seen), -1) if of_losses else rows_LN[:, :0]
    means = torch.cat([losses_LM, rows_LN], dim=1).mean(dim=0)
    tokens = tokens_L1.mean().view(1)
    averages = torch.cat([tokens, torch.cat([combined.view(1), means]) * tokens])
    if not each:
        return averages
    weighted_LN = torch.cat([rows_LN * tokens_L1, tokens_L1], dim=1)
    rows = dict(zip((layer.label for layer in seen), weighted_LN, strict=True))
    nothing = torch.zeros_like(weighted_LN[0])
    chosen = [_chosen(layer, rows_LN) for layer in each]
    return torch.cat(
        [
            averages,
            *(rows.get(layer.label, nothing) for layer in each),
            *(assigned_E for assigned_E, _ in chosen),
            *(dropped_E for _, dropped_E in chosen),
        ]
    )


def _chosen(layer: MoEFeedForward, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the assignments of each expert [E], and the dropped ones [E]."""
    if not layer.seen:
        nothing = like.new_zeros(layer.config.num_experts)
        return nothing, nothing
    tally = layer.record.tally
    assigned_E = tally.assigned_KE.sum(dim=0)
    return assigned_E, assigned_E - tally.kept_E


def _can_be_full(layer: MoEFeedForward) -> bool:
    config = layer.config
    return config.choice == "tokens" and capacity_of(config, layer.training).is_limited


def _length(layout: Layout) -> int:
    columns = len(metric_names(layout.top_k)) + 1
    return 1 + len(layout.averages) + columns * len(layout.layers) + 2 * sum(layout.experts)


def _exchange_times(layers: list[MoEFeedForward]) -> dict[str, float]:
    times: dict[str, float] = {}
    for layer in layers:
        if layer.timer is not None:
            for name, ms in layer.timer.read_and_reset().items():
                times[name] = times.get(name, 0.0) + ms
    return times


def _log_numbers(layout: Layout, numbers: Tensor, index: int) -> None:
    count = 1 + len(layout.averages)
    tokens, *sums = numbers[:count].tolist()
    for name, total in zip(layout.averages, sums, strict=True):
        metrics.log_scalar(name, total / max(tokens, 1e-9), max(tokens, 1e-9), PRIORITY, round=4)
    if layout.layers:
        of_experts = 2 * sum(layout.experts)
        sums_LN = numbers[count:-of_experts].view(len(layout.layers), -1)
        sums_2E = numbers[-of_experts:].view(2, -1)
        if layout.lists:
            _log_lists(layout, sums_LN, sums_2E, index)
        if layout.scalars:
            _log_scalars(layout, sums_LN, sums_2E)


def _log_lists(layout: Layout, sums_LN: Tensor, sums_2E: Tensor, index: int) -> None:
    """Log a list over layers for each metric, and lists over experts for each layer.

    fairseq's meters hold no lists, so they are derived from two meters of sums, which are not printed.
    """
    meter = _sum_up("layers", sums_LN, index)
    for name, column in _columns(layout.top_k).items():
        _derive(f"moe_layers_{name}", meter, partial(_averages, column=column), digits=4)
    meter = _sum_up("experts", sums_2E, index)
    for label, part, limited in _parts(layout):
        _derive(f"moe_load_{label}", meter, partial(_load, part=part), digits=3)
        if limited:
            _derive(f"moe_dropped_{label}", meter, partial(_dropped, part=part), digits=4)


def _log_scalars(layout: Layout, sums_LN: Tensor, sums_2E: Tensor) -> None:
    """Log the same numbers as scalars."""
    tokens_L = sums_LN[:, -1].tolist()
    for name, column in _columns(layout.top_k).items():
        # moe_dropped_decoder_1 is a list over experts.
        name = "dropped_percent" if name == "dropped" else name
        averages = _averages(sums_LN, column)
        for label, value, tokens in zip(layout.layers, averages, tokens_L, strict=True):
            metrics.log_scalar(f"moe_{name}_{label}", value, tokens, PRIORITY, round=4)
    for label, part, limited in _parts(layout):
        assigned_E = sums_2E[0, part].tolist()
        for e, load in enumerate(_load(sums_2E, part)):
            metrics.log_scalar(f"moe_load_{label}_expert{e}", load, sum(assigned_E), PRIORITY, round=3)
        if limited:
            for e, share in enumerate(_dropped(sums_2E, part)):
                metrics.log_scalar(
                    f"moe_dropped_{label}_expert{e}", share, assigned_E[e], PRIORITY, round=4
                )


def _columns(top_k: int) -> dict[str, int]:
    """Return the columns of the metrics that are logged for each layer, by their short names."""
    columns = metric_names(top_k)
    return {
        short: columns.index(name)
        for metric in METRICS
        if metric.layers
        for short, name in zip(metric.names(top_k, metric.layers), metric.names(top_k), strict=True)
    }


def _averages(sums_LN: Tensor, column: int) -> list[float | None]:
    """Return a metric of each layer, None for a layer without tokens."""
    rows = sums_LN.tolist()
    return [row[column] / row[-1] if row[-1] > 0 else None for row in rows]


def _load(sums_2E: Tensor, part: slice) -> list[float]:
    """Return the load of a layer's experts, in even shares."""
    assigned_E = sums_2E[0, part].tolist()
    even = max(sum(assigned_E), 1) / len(assigned_E)
    return [n / even for n in assigned_E]


def _dropped(sums_2E: Tensor, part: slice) -> list[float]:
    """Return the dropped share, from 0 to 1, of the assignments of each expert of a layer."""
    assigned_E, dropped_E = sums_2E[:, part].tolist()
    return [n / max(of, 1) for of, n in zip(assigned_E, dropped_E, strict=True)]


def _parts(layout: Layout) -> Iterator[tuple[str, slice, bool]]:
    """Yield (label, slice of its experts, whether they can be full) of each logged layer."""
    ends = accumulate(layout.experts)
    for label, size, end, limited in zip(layout.layers, layout.experts, ends, layout.limited, strict=True):
        yield label, slice(end - size, end), limited


def _sum_up(name: str, sums: Tensor, index: int) -> str:
    """Add to a meter, and return its key.

    Checkpoints contain meters. The key has the shape and the index of the layout, so that sums of different
    layouts are never added.
    """
    key = "_moe_" + name + "_" + "x".join(map(str, sums.shape)) + (f"_{index}" if index else "")
    metrics.log_scalar(key, sums, 1)
    return key


def _derive(name: str, meter: str, view: Callable[[Tensor], list], digits: int) -> None:
    def rounded(meters: Any) -> list[float | None]:
        sums = meters[meter].sum
        if not torch.is_tensor(sums):  # empty since the last reset
            return []
        return [None if value is None else round(value, digits) for value in view(sums)]

    metrics.log_derived(name, rounded, PRIORITY)
