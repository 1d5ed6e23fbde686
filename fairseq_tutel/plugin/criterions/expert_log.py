"""Logs metrics of experts: averages over layers and, in JSON logs, values of each layer and expert.

For each log key, fairseq sums the values of all micro-batches and ranks. The criterion's class method
`reduce_metrics` gets the sums, but has no access to the model. One log entry therefore holds all expert
metrics as a vector, and the entry's key is the vector's `Layout` as JSON.

Shape suffixes are L (MoE layers), E (experts) and N (metrics of a layer).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from fairseq.logging import metrics
from torch import Tensor

from fairseq_tutel.moe.metrics import METRICS, metric_names, metric_rows
from fairseq_tutel.moe.slots import capacity_of
from fairseq_tutel.plugin.feed_forward import MoEFeedForward, MoERecord

PREFIX = "moe_numbers "
# Prefixes of the logging keys that `expert_log` returns.
OURS = ("moe_", "all_to_all_")
# In a log line, expert metrics come after fairseq's metrics.
PRIORITY = 900
# A function that converts summed metrics to a list, with None for a layer without tokens.
View = Callable[[Tensor], list[float | None]]


class Layout(NamedTuple):
    """Describes the order of the numbers in the vector that holds a micro-batch's expert metrics.

    All averages and metrics are multiplied by the number of real (non-padding) tokens. The order is:

    - the number of real tokens; averages over layers (losses, then N metrics);
    - for each logged layer: N metrics, and the number of real tokens;
    - the assignments of each expert of the logged layers; then the dropped assignments of each expert.
    """

    losses: Sequence[str]
    top_k: int  # The number of experts per token.
    layers: Sequence[str]  # The labels of the logged layers.
    experts: Sequence[int]  # The number of experts in each logged layer.
    limited: Sequence[bool]  # Whether each logged layer limits its experts' capacity.

    @property
    def averages(self) -> list[str]:
        """The names of the metrics that are averaged over layers, in the order of the metrics vector."""
        return [*self.losses, *metric_names(self.top_k)]


def expert_log(layers: list[MoEFeedForward], combined: dict[str, Tensor], lists: bool) -> dict[str, Any]:
    """Return the expert metrics of a micro-batch as entries of the logging output.

    With `lists`, the metrics of each layer and expert are logged, too. `combined` has the losses that are
    combined over layers; their keys are names in the log. In averages, a layer that LayerDrop skipped has
    weight 0, and a batch without real tokens has weight 0.
    """
    each = layers if lists else []
    of_layers = [f"moe_{name}_loss" for name in layers[0].balance_weights]
    layout = Layout(
        losses=[*combined, *of_layers, *(["moe_cmr_gate"] if layers[0].config.cmr else [])],
        top_k=layers[0].config.top_k,
        layers=[layer.label for layer in each],
        experts=[layer.config.num_experts for layer in each],
        limited=[
            layer.config.choice == "tokens" and capacity_of(layer.config, layer.training).is_limited
            for layer in each
        ],
    )
    seen = [layer for layer in layers if layer.seen]
    if seen:
        numbers = _numbers(seen, list(combined.values()), each)
    else:
        columns = len(metric_names(layout.top_k)) + 1
        length = 1 + len(layout.averages) + columns * len(each) + 2 * sum(layout.experts)
        numbers = torch.zeros(length, device=combined["moe_gate_loss"].device)
    times: Counter[str] = Counter()
    for layer in layers:
        if layer.timer is not None:
            times.update(layer.timer.read_and_reset())
    return {PREFIX + json.dumps(layout): numbers, "moe_micro_batches": int(bool(seen)), **times}


def without_experts(logging_outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return logging outputs without the expert metrics, because some criterions log every entry."""
    return [
        {key: value for key, value in log.items() if not key.startswith(OURS)} for log in logging_outputs
    ]


def reduce_expert_log(logging_outputs: list[dict[str, Any]]) -> None:
    """Log the expert metrics as averages over micro-batches and ranks, weighted by real tokens."""
    keys = dict.fromkeys(k for log in logging_outputs for k in log if k.startswith(PREFIX))
    for index, key in enumerate(keys):  # Each language pair has a separate key.
        numbers = sum(log[key] for log in logging_outputs if key in log)
        layout = Layout(*json.loads(key.removeprefix(PREFIX)))
        _log_numbers(layout, numbers.cpu().double(), index)
    batches = sum(log.get("moe_micro_batches", 0) for log in logging_outputs)
    for name in ("all_to_all_cpu_time_ms", "all_to_all_cuda_time_ms"):
        if any(name in log for log in logging_outputs):
            total = sum(log.get(name, 0) for log in logging_outputs)
            metrics.log_scalar(name, total / max(batches, 1), priority=PRIORITY, round=3)


def _numbers(seen: list[MoEFeedForward], combined: list[Tensor], each: list[MoEFeedForward]) -> Tensor:
    """Return the expert metrics as a vector in the order of `Layout`; `seen` has the layers that ran."""
    records = [layer.record for layer in seen]
    rows_LN, tokens_L1 = metric_rows([record.tally for record in records])
    of_losses = [value for record in records for value in _averaged(record)]
    losses_LM = torch.stack(of_losses).view(len(seen), -1) if of_losses else rows_LN[:, :0]
    means = torch.cat([losses_LM, rows_LN], dim=1).mean(dim=0)
    tokens = tokens_L1.mean().view(1)
    averages = torch.cat([tokens, torch.cat([torch.stack(combined), means]) * tokens])
    if not each:
        return averages
    weighted_LN = torch.cat([rows_LN * tokens_L1, tokens_L1], dim=1)

    def of_layer(layer: MoEFeedForward) -> tuple[Tensor, Tensor, Tensor]:
        if not layer.seen:
            nothing_E = rows_LN.new_zeros(layer.config.num_experts)
            return torch.zeros_like(weighted_LN[0]), nothing_E, nothing_E
        tally = layer.record.tally
        assigned_E = tally.assigned_KE.sum(dim=0)
        return weighted_LN[seen.index(layer)], assigned_E, assigned_E - tally.kept_E

    return torch.cat([averages, *chain.from_iterable(zip(*map(of_layer, each), strict=True))])


def _averaged(record: MoERecord) -> list[Tensor]:
    """Return the metrics of a layer that are averaged over layers: its losses and the mean CMR gate."""
    values = list(record.losses.values())
    if record.cmr_sum is not None:
        values.append(record.cmr_sum / record.tally.num_tokens.clamp_min(1))
    return values


def _log_numbers(layout: Layout, numbers: Tensor, index: int) -> None:
    count = 1 + len(layout.averages)
    tokens, *sums = numbers[:count].tolist()
    for name, total in zip(layout.averages, sums, strict=True):
        metrics.log_scalar(name, total / max(tokens, 1e-9), max(tokens, 1e-9), PRIORITY, round=4)
    if not layout.layers:
        return
    of_experts = 2 * sum(layout.experts)
    tables = {
        "layers": numbers[count:-of_experts].view(len(layout.layers), -1),
        "experts": numbers[-of_experts:].view(2, -1),
    }
    # fairseq's meters cannot hold lists. Lists are therefore computed from two hidden meters of sums.
    meters = {name: _sum_up(name, table, index) for name, table in tables.items()}
    for table, name, digits, view in _views(layout):
        rounded = partial(_rounded, meter=meters[table], view=view, digits=digits)
        metrics.log_derived(name, rounded, PRIORITY)


def _views(layout: Layout) -> Iterator[tuple[str, str, int, View]]:
    """Yield (table of sums, log name, decimal places, view) for each metric of single layers or experts.

    The view is a function that computes the logged list from the table of sums.
    """
    columns = metric_names(layout.top_k)
    for metric in METRICS:
        names = metric.names(layout.top_k, metric.layers) if metric.layers else []
        for short, column in zip(names, metric.names(layout.top_k), strict=False):
            view = partial(_averages, column=columns.index(column))
            yield "layers", f"moe_layers_{short}", 4, view
    ends = accumulate(layout.experts)
    for label, size, end, limited in zip(layout.layers, layout.experts, ends, layout.limited, strict=True):
        part = slice(end - size, end)
        yield "experts", f"moe_load_{label}", 3, partial(_loads, part=part)
        if limited:
            yield "experts", f"moe_dropped_{label}", 4, partial(_dropped, part=part)


def _averages(sums_LN: Tensor, column: int) -> list[float | None]:
    return [row[column] / row[-1] if row[-1] > 0 else None for row in sums_LN.tolist()]


def _loads(sums_2E: Tensor, part: slice) -> list[float | None]:
    """Return the load of each expert, relative to an even share of the assignments."""
    assigned_E = sums_2E[0, part].tolist()
    return [n / (max(sum(assigned_E), 1) / len(assigned_E)) for n in assigned_E]


def _dropped(sums_2E: Tensor, part: slice) -> list[float | None]:
    """Return the fraction of dropped assignments of each expert."""
    assigned_E, dropped_E = sums_2E[:, part].tolist()
    return [n / max(of, 1) for of, n in zip(assigned_E, dropped_E, strict=True)]


def _sum_up(name: str, sums: Tensor, index: int) -> str:
    """Add sums to a fairseq meter and return the meter's key, which depends on name, shape and index."""
    # Checkpoints contain meters, so a meter of another shape or index must have another key.
    key = "_moe_" + name + "_" + "x".join(map(str, sums.shape)) + (f"_{index}" if index else "")
    metrics.log_scalar(key, sums, 1)
    return key


def _rounded(meters: Any, meter: str, view: View, digits: int) -> list[float | None]:
    sums = meters[meter].sum
    if not torch.is_tensor(sums):  # No metric was logged since the last reset.
        return []
    return [None if value is None else round(value, digits) for value in view(sums)]
