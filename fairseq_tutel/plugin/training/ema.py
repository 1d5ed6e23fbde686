"""Computes the moving average of a model's weights (--store-ema) if each rank has only some experts.

Each rank averages only the experts that it holds. A checkpoint contains the average of all experts, so a
run can resume on any number of ranks.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from fairseq.models.ema.ema import EMA
from torch import Tensor, nn

from fairseq_tutel.checkpoint.experts import gather_experts, gather_to_first, release
from fairseq_tutel.moe.expert_stack import ExpertStack
from fairseq_tutel.parallel.groups import Topology
from fairseq_tutel.plugin.optim.moe_optimizer import own_part
from fairseq_tutel.plugin.run_state import RUN

# Names of a parameter's averages in shard files: in the model's dtype, and in fp32 (--ema-fp32).
AVERAGE, WIDE_AVERAGE = "ema", "ema_fp32"


class ExpertEMA(EMA):
    """fairseq's EMA for a model with experts; each rank averages only the experts that it holds."""

    model: nn.Module
    config: Any  # The type is fairseq's EMAConfig.
    fp32_params: dict[str, Any]
    decay: float

    def restore(self, state_dict: dict[str, Any], build_fp32_params: bool = False) -> None:
        """Load averages from a checkpoint that has all experts, and then clear `state_dict`."""
        super().restore(state_dict, build_fp32_params)
        state_dict.clear()  # fairseq would keep all averages in memory.

    def build_fp32_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Copy fp32 averages from the current averages or, if called by `restore`, from a checkpoint."""
        own = None
        if state_dict is not None:
            own = dict(state_dict)
            state_dict.clear()
            for key, parameter in self._experts():
                if key in own:
                    own[key] = own_part({AVERAGE: own[key]}, parameter, RUN.topology)[AVERAGE]
        super().build_fp32_params(own)

    def step(self, new_model: nn.Module, updates: int | None = None) -> None:
        """Average the weights if the number of updates is a multiple of --ema-update-freq.

        Without this method, a resumed run would count updates from the start of its process.
        """
        if updates is not None and self.config.ema_update_freq > 1:
            self.update_freq_counter = (updates - 1) % self.config.ema_update_freq
        super().step(new_model, updates)

    @torch.no_grad()
    def _step_internal(self, new_model: nn.Module, updates: Any = None) -> None:
        """Update averages in place; fairseq's method calls `restore`, which expects all ranks' experts."""
        current, seen = self.model.state_dict(), set[int]()
        averages = self.fp32_params or current
        for key, value in new_model.state_dict().items():
            average = averages[key]
            if average.data_ptr() not in seen:  # A tied weight has several keys.
                seen.add(average.data_ptr())
                if average.is_floating_point() and "version" not in key:
                    average.mul_(self.decay).add_(value.to(average.dtype), alpha=1 - self.decay)
                else:
                    average.copy_(value)
            if averages is not current:
                current[key].copy_(average)

    def averages_of(self, model: nn.Module) -> dict[int, dict[str, Tensor]]:
        """Return the averages of this rank's experts, keyed by the ids of `model`'s parameters."""
        trained = dict(model.named_parameters(remove_duplicate=False))
        found = {}
        for key, parameter in self._experts():
            found[id(trained[key])] = {AVERAGE: parameter.data}
            if self.fp32_params:
                found[id(trained[key])][WIDE_AVERAGE] = self.fp32_params[key]
        return found

    @contextlib.contextmanager
    def saved_with(self, records: Mapping[tuple[str, str], Any]) -> Iterator[None]:
        """Context manager; checkpoints saved in it have shard records in place of the experts' averages.

        The keys of `records` are (layer, name), where a name is, for example, "fc1_weight.ema".
        """
        for layer, stack in self._stacks():
            names = stack.expert_parameters()
            stack.save_as({name: records[layer, f"{name}.{AVERAGE}"] for name in names})
        wide = {
            f"{layer}.{name.removesuffix(f'.{WIDE_AVERAGE}')}": record
            for (layer, name), record in records.items()
            if name.endswith(f".{WIDE_AVERAGE}")
        }
        with self._saved(wide):
            yield

    @contextlib.contextmanager
    def gathered(self, topology: Topology) -> Iterator[None]:
        """Context manager in which rank 0 saves the averages of all ranks' experts. Collective."""
        gather_experts(self.model, topology)
        wide = {}
        if self.fp32_params and topology.expert_parallel_size > 1:
            for key, parameter in self._experts():
                wide[key] = gather_to_first(self.fp32_params[key], topology, parameter)
        with self._saved(wide if topology.rank == 0 else {}):
            yield

    @contextlib.contextmanager
    def _saved(self, wide: Mapping[str, Any]) -> Iterator[None]:
        own, self.fp32_params = self.fp32_params, {**self.fp32_params, **wide}
        try:
            yield
        finally:
            self.fp32_params = own
            release(self.model)

    def _stacks(self) -> Iterator[tuple[str, ExpertStack]]:
        for layer, module in self.model.named_modules():
            if isinstance(module, ExpertStack):
                yield layer, module

    def _experts(self) -> Iterator[tuple[str, nn.Parameter]]:
        for layer, stack in self._stacks():
            for name, parameter in stack.expert_parameters().items():
                yield f"{layer}.{name}", parameter
