"""Collects experts' optimizer state and moving averages, and maps saved records to parameter indices."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from fairseq.trainer import Trainer
from torch import Tensor

from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.optim.moe_optimizer import MoEOptimizerMixin
from fairseq_tutel.plugin.training.ema import AVERAGE, WIDE_AVERAGE, ExpertEMA


class ExpertStates:
    """The optimizer state and moving averages of a trainer's experts, which are saved with the parameters.

    Args:
        trainer: fairseq's trainer.
        inner: the optimizer, or None if its state is not saved by parameter.
        ema: the moving average of the weights, or None without --store-ema.
    """

    def __init__(self, trainer: Trainer, inner: MoEOptimizerMixin | None, ema: ExpertEMA | None) -> None:
        self._model, self.inner, self.ema = trainer.get_model(), inner, ema
        self._averages = {} if ema is None else ema.averages_of(self._model)
        # The optimizer identifies a parameter, or the parameter's fp32 master, by its index in this list.
        trained = getattr(trainer.optimizer, "fp16_params", None) or (inner.model_params() if inner else [])
        self._index_of = {id(parameter): index for index, parameter in enumerate(trained)}

    def of(self, parameter: Any) -> Mapping[str, Tensor]:
        """Return the optimizer state and moving averages of experts' stacked `parameter`. Collective."""
        index = self._index_of.get(id(parameter))
        state = {} if self.inner is None or index is None else self.inner.expert_state(index)
        return {**state, **self._averages.get(id(parameter), {})}

    def by_index(self, records: Mapping[tuple[str, str], Any]) -> dict[int, dict[str, Any]]:
        """Return the optimizer state in `records` as {parameter index: {state key: record}}.

        The keys of `records` are (qualified name of the layer's experts, tensor name).
        """
        stacks = {layer: m for layer, m in self._model.named_modules() if isinstance(m, ExpertStack)}
        found: dict[int, dict[str, Any]] = {}
        for (layer, tensor), record in records.items():
            name, _, key = tensor.rpartition(".")
            index = self._index_of.get(id(stacks[layer].expert_parameters().get(name)))
            if index is not None and key not in (AVERAGE, WIDE_AVERAGE):
                found.setdefault(index, {})[key] = record
        return found

    @contextlib.contextmanager
    def saved_as(self, records: Mapping[tuple[str, str], Any], topology: Topology) -> Iterator[None]:
        """Context manager; checkpoints saved in it have shard records instead of experts' state and EMA.

        The keys of `records` are pairs (layer, tensor name). Collective.
        """
        if self.inner is not None:
            self.inner.save_state(self.by_index(records), topology)
        with contextlib.nullcontext() if self.ema is None else self.ema.saved_with(records):
            yield
