"""A mixin with which fairseq's optimizers support experts on several ranks, ZeRO and offload.

fairseq's fp16 and memory-efficient wrappers accept an optimizer that has this mixin. The optimizer state in
a checkpoint has the same format as fairseq's.
"""

import logging
from typing import Any

from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.optim import (
    OPTIMIZER_DATACLASS_REGISTRY,
    OPTIMIZER_REGISTRY,
    FairseqOptimizer,
    register_optimizer,
)
from torch import Tensor, nn

from fairseq_tutel.checkpoint.experts import gather_to_first
from fairseq_tutel.checkpoint.shards import ShardedTensor, unbind
from fairseq_tutel.parallel import gradients
from fairseq_tutel.parallel.collectives import is_replaced
from fairseq_tutel.parallel.groups import Slice, Topology, cut, slice_of
from fairseq_tutel.parallel.zero_state import MASTER, ZeroState
from fairseq_tutel.plugin.optim import zero
from fairseq_tutel.plugin.run_state import RUN

logger = logging.getLogger(__name__)


class MoEOptimizerMixin:
    """Mixin with which a FairseqOptimizer class supports experts on several ranks, ZeRO and offload."""

    optimizer: Any  # The torch optimizer.
    params: Any
    cfg: Any
    # With ZeRO or offload, the optimizer updates the partitions in this ZeroState instead of parameters.
    zero: ZeroState | None = None
    _gathered_state: dict[int, dict[str, Any]] | None = None
    # Whether the optimizer's parameters are fp32 master copies of half-precision parameters.
    holds_masters: bool = False
    # `times_clipped` increases once per update, even if an overflow skips the optimizer step.
    times_clipped: int = 0

    def __init__(self, cfg: Any, params: Any) -> None:
        options = zero.zero_options(cfg)
        if options is not None:
            params = list(params)
            self.zero = ZeroState(params, RUN.topology, options.stage, options.offload)
            logger.info(
                "this rank keeps the optimizer state of %d of %d parameter elements",
                sum(own.numel() for own in self.zero.parameters),
                sum(parameter.numel() for parameter in params),
            )
            params = self.zero.parameters
        super().__init__(cfg, params)  # type: ignore[call-arg]

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        """Whether the optimizer accepts half-precision parameters, as every optimizer does with ZeRO."""
        return self.zero is not None or super().supports_memory_efficient_fp16  # type: ignore[misc]

    @property
    def is_apart(self) -> bool:
        """Whether the optimizer state is sharded over several ranks."""
        return self.zero is not None and any(bucket.share.size > 1 for bucket in self.zero.buckets)

    def model_params(self) -> list[nn.Parameter]:
        """Return the model's parameters, ordered by their indices in the optimizer state."""
        if self.zero is None:
            return list(self.params)
        return [partition.parameter for partition in self.zero.partitions]

    def zero_grad(self) -> None:
        """Reset the gradients of the model's parameters and of their ZeRO partitions."""
        super().zero_grad()  # type: ignore[misc]
        if self.zero is not None:
            self.zero.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; under ZeRO stage 2, reduce gradients during the backward pass."""
        super().backward(loss)  # type: ignore[misc]
        self.finish_backward()

    def finish_backward(self) -> None:
        """With ZeRO, reduce the gradients that are not yet reduced; ZeroFP16Optimizer calls this method."""
        if self.zero is not None:
            self.zero.reducer.finish_backward()

    def all_reduce_grads(self, module: Any) -> None:
        """Reduce the gradients of dense parameters and experts over the ranks. Collective.

        Under ZeRO, each rank gets the summed gradients of its partitions of all parameters, including a
        criterion's parameters.
        Without ZeRO, the data-parallel wrapper or a collective plan reduces dense gradients.
        """
        if self.zero is not None and self.zero.stage > 0:
            self.zero.reducer.reduce()
            return
        topology = RUN.topology
        if _reduces_here(module):
            gradients.reduce_dense_gradients(module.parameters(), topology.world_size)
        else:
            super().all_reduce_grads(module)  # type: ignore[misc]
        if topology.expert_parallel_size > 1:
            gradients.reduce_expert_gradients(module.parameters(), topology)
        if topology.world_size > 1:
            gradients.rescale_expert_gradients(module.parameters(), topology.world_size)

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients by c; under ZeRO, `step` does this when it converts gradients to fp32."""
        if self.zero is None:
            super().multiply_grads(c)  # type: ignore[misc]
        else:
            self.zero.multiply(c)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """Clip gradients by their norm over dense parameters and all ranks' experts; return this norm."""
        self.times_clipped += 1
        if self.zero is not None:
            return self.zero.clip(max_norm)
        params = list(self.params)
        if RUN.topology.expert_parallel_size > 1:
            norm = gradients.global_grad_norm(params, RUN.topology)
        else:
            norm = gradients.local_grad_norm(params)
            if aggregate_norm_fn is not None:
                norm = aggregate_norm_fn(norm)
        gradients.clip_gradients(params, max_norm, norm)
        return norm

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the parameters, and free optimizer state that was gathered for a checkpoint."""
        if self.zero is None:
            self._step(*args, **kwargs)
        else:
            self.zero.step(self.optimizer, lambda: self._step(*args, **kwargs))

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self._gathered_state = None
        super().step(*args, **kwargs)  # type: ignore[misc]

    def expert_state(self, index: int) -> dict[str, Tensor]:
        """Return the optimizer state [e, ...] of parameter `index`, which stacks e experts. Collective.

        The state includes an fp32 master, if any. Offloaded state is in host memory. With fairseq's
        memory-efficient wrapper, a loaded checkpoint's state is in host memory until the first step.
        """
        parameter = self.model_params()[index]
        if self.zero is not None:
            state = self._whole_tensors(index)
        else:
            state = dict(self.optimizer.state.get(parameter, {}))
            if self.holds_masters:
                state[MASTER] = parameter.data
            state = {
                k: state[k] for k in sorted(state) if _is_per_expert(state[k], parameter, len(parameter))
            }
        return state

    def gather_state(self, topology: Topology) -> None:
        """Gather the experts' optimizer state to rank 0 for rank 0's next `state_dict`. Collective."""
        gathered: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self.model_params()):
            if gradients.is_expert(parameter):
                gathered[index] = {
                    key: gather_to_first(value, topology, parameter)
                    for key, value in self.expert_state(index).items()
                }
        self.save_state(gathered, topology)

    def save_state(self, state: dict[int, dict[str, Any]], topology: Topology) -> None:
        """Set the optimizer state that rank 0's next `state_dict` contains instead of local state.

        The dict `state` maps a parameter's index to that parameter's state. With ZeRO, this method is a
        collective that also gathers the optimizer state of all other parameters.
        """
        self._gathered_state = state if topology.rank == 0 else None
        if not self.is_apart:
            return
        for index in range(len(self.model_params())):
            if index in state:
                continue
            whole = self._whole_tensors(index)
            if self._gathered_state is not None:
                self._gathered_state[index] = {key: value.cpu() for key, value in whole.items()}

    def _whole_tensors(self, index: int) -> dict[str, Tensor]:
        assert self.zero is not None
        state = self.optimizer.state.get(self.zero.parameters[index], {})
        whole = self.zero.whole_state(index, state)
        shape = self.zero.partitions[index].parameter.shape
        return {key: whole[key] for key in sorted(whole) if getattr(whole[key], "shape", None) == shape}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer state for a checkpoint.

        The optimizer state includes fp32 masters, because fairseq saves only half-precision weights, from
        which a run could not resume exactly.
        """
        state_dict = super().state_dict()  # type: ignore[misc]
        state = state_dict.get("state", {})  # A composite optimizer has no `state`.
        if self.holds_masters and "state" in state_dict:
            for index, parameter in enumerate(self.params):
                state[index] = {**state.get(index, {}), MASTER: parameter.data}
        if self.zero is not None:
            for index, partition in enumerate(self.zero.partitions):
                if partition.share.size == 1 and (index in state or partition.is_master):
                    state[index] = self.zero.whole_state(index, state.get(index, {}))
        for index, tensors in (self._gathered_state or {}).items():
            state[index] = {**state.get(index, {}), **tensors}
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict | None = None) -> None:
        """Load this rank's part of a complete optimizer state, and restore fp32 master weights."""
        topology = RUN.topology
        # The state dict is changed in place, because fairseq's memory-efficient wrapper reads it later.
        state = state_dict.get("state", {})
        for index, parameter in enumerate(self.model_params()):
            if topology.expert_parallel_size > 1 and gradients.is_expert(parameter) and index in state:
                state[index] = own_part(state[index], parameter, topology)
        unbind(state)  # This call reads tensors from shard files.
        if self.zero is not None:
            for index in state.keys() & range(len(self.zero.partitions)):
                state[index] = self.zero.own_state(index, state[index])
        masters = {i: state[i].pop(MASTER) for i in list(state) if MASTER in state[i]}
        super().load_state_dict(state_dict, optimizer_overrides)  # type: ignore[misc]
        params = list(self.params)
        for index, master in masters.items():
            params[index].data.copy_(master)


def _reduces_here(module: Any) -> bool:
    """Return whether a collective plan, instead of fairseq's wrapper, sums dense gradients."""
    while not isinstance(module, LegacyDistributedDataParallel):
        module = getattr(module, "module", None)  # fairseq's wrappers hold a model in `module`.
        if module is None:
            return False
    return not module.accumulate_grads and is_replaced("all_reduce", None)


def _is_per_expert(value: Any, parameter: Tensor, num_experts: int) -> bool:
    """Return whether a tensor of optimizer state has one entry per expert along dimension 0."""
    if not isinstance(value, Tensor | ShardedTensor):
        return False
    return len(value.shape) == parameter.dim() and value.shape[0] == num_experts


def own_part(state: dict[str, Any], parameter: Tensor, topology: Topology) -> dict[str, Any]:
    """Return the part of a parameter's optimizer state that belongs to this rank's experts."""
    slicing, shape = slice_of(parameter), list(parameter.shape)
    shape[0] = shape[0] * topology.expert_parallel_size // slicing.count
    shape[slicing.dim] *= slicing.count
    part = topology.part(shape[0])

    def own(value: Tensor | ShardedTensor) -> Tensor:
        # A tensor whose shape differs from the parameter's, such as a scale, is equal on all expert shards.
        cut_as = slicing if list(value.shape) == shape else Slice()
        index = part.index if cut_as.count > 1 else 0
        if isinstance(value, ShardedTensor):
            return value.read(part.first, part.num_local, cut_as, index)
        local = value[part.first : part.first + part.num_local]
        return cut(local, cut_as, index).clone()

    return {
        key: own(value) if _is_per_expert(value, parameter, shape[0]) else value
        for key, value in state.items()
    }


def innermost_optimizer(optimizer: FairseqOptimizer) -> Any:
    """Return the optimizer inside fairseq's fp16 or memory-efficient wrapper."""
    for name in ("fp32_optimizer", "wrapped_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, FairseqOptimizer):
            return inner
    return optimizer


def variant_name(name: str) -> str:
    """Return the registered name of an optimizer's MoE variant, such as `moe_adam` for `adam`."""
    return name if name.startswith("moe_") else f"moe_{name}"


def register_variants() -> None:
    """Register a MoE variant of every fairseq optimizer that has no MoE variant yet."""
    for name, stock in list(OPTIMIZER_REGISTRY.items()):
        if name.startswith("moe_") or variant_name(name) in OPTIMIZER_REGISTRY:
            continue
        variant = type(f"MoE{stock.__name__}", (MoEOptimizerMixin, stock), {"__doc__": stock.__doc__})
        dataclass = OPTIMIZER_DATACLASS_REGISTRY.get(name)
        register_optimizer(variant_name(name), dataclass=dataclass)(variant)
