"""ZeRO and optimizer offload for fairseq's optimizers: options, checks, the mixin, and its fp16 wrapper.

An optimizer with the mixin updates partitions of the parameters. It keeps fp32 masters itself, so that
fairseq's loss scaling needs another wrapper.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fairseq.optim import MemoryEfficientFP16Optimizer
from torch import Tensor, nn

from fairseq_tutel.moe.option_table import TaskConfig
from fairseq_tutel.optim.moe_optimizer import ONLY_OF_RANK, MoEOptimizerMixin
from fairseq_tutel.options.option import read, refuse_bad_values
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.ranks import world
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.zero.state import ZeroState

logger = logging.getLogger(__name__)

# Optimizers whose update of an element depends on others; a rank with a part of them would diverge.
NOT_ELEMENTWISE = ("adafactor", "lamb", "composite")


@dataclass(frozen=True)
class ZeroOptions:
    """Where optimizer state is kept.

    Attributes:
        stage: 0: whole on every rank; 1: sharded; 2: with sharded gradients.
        offload: in host memory.
    """

    stage: int
    offload: bool

    @property
    def flags(self) -> str:
        """The flags, for messages."""
        given = [f"--moe-zero-stage {self.stage}"] if self.stage else []
        return " ".join(given + ["--moe-offload-optimizer"] * self.offload)


def zero_options(cfg: Any) -> ZeroOptions | None:
    """Return the given options; None for ordinary optimizers, and for a model without experts.

    On one rank the stage is 0.

    Args:
        cfg: the FairseqConfig, or an optimizer's section; fairseq's older optimizers have the command line.
    """
    if hasattr(cfg, "_get_root"):
        root = cfg._get_root()
        cfg = root.task if "task" in root else cfg
    options = read(TaskConfig, cfg)
    refuse_bad_values(options)
    # A model without experts created no groups; the task warns that its options have no effect.
    ranks = world.size()
    stage = options.moe_zero_stage if ranks > 1 else 0
    if not (stage or options.moe_offload_optimizer) or RUN.topology.world_size != ranks:
        return None
    return ZeroOptions(stage, options.moe_offload_optimizer)


def refuse_with_zero(root: Any, asked: ZeroOptions) -> None:
    """Refuse options that do not work with partitions."""
    common, name = root.common, str(root.optimizer._name)
    bad = [
        (
            name.removeprefix("moe_") in NOT_ELEMENTWISE,
            f"--optimizer is {name}, whose updates depend on whole parameters, and {asked.flags} gives it "
            "parts of them; use moe_adam, or drop the latter.",
        ),
        (
            getattr(root.optimizer, "fp16_adam_stats", False),
            f"--fp16-adam-stats is set, whose scales are of whole parameters, and {asked.flags} shards "
            "them; drop one of the two.",
        ),
        (
            common.amp,
            f"--amp is set, whose scaler checks a rank's own gradients, and {asked.flags} moves them to "
            "other ranks; use --fp16 or --bf16.",
        ),
        *(
            (
                common[f"memory_efficient_{precision}"],
                f"--memory-efficient-{precision} is set, which keeps no fp32 masters, and {asked.flags} "
                f"keeps them apart; use --{precision}.",
            )
            for precision in ("fp16", "bf16")
        ),
        (
            root.optimization.use_bmuf,
            f"--use-bmuf is set, which averages whole weights; drop it or {asked.flags}.",
        ),
    ]
    refuse_first(bad)


def refuse_first(rules: Iterable[tuple[Any, str]]) -> None:
    """Raise the message of the first rule whose condition holds."""
    for condition, message in rules:
        if condition:
            raise ValueError(message)


class ZeroOptimizerMixin(MoEOptimizerMixin):
    """Precedes a FairseqOptimizer class; without ZeRO and offload it changes nothing.

    The stock optimizer updates the partitions. To wrappers this is an ordinary optimizer of the model's
    parameters, and a checkpoint has an ordinary state.
    """

    zero: ZeroState | None = None

    def __init__(self, cfg: Any, params: Any) -> None:
        options = zero_options(cfg)
        if options is not None:
            topology = RUN.topology
            params = list(params)
            self.zero = ZeroState(params, topology, options.stage, options.offload)
            logger.info(
                "%s: this rank keeps the state of %d of %d parameters' elements%s",
                options.flags,
                sum(own.numel() for own in self.zero.parameters),
                sum(parameter.numel() for parameter in params),
                ", in host memory" if options.offload else "",
            )
            params = self.zero.parameters
        super().__init__(cfg, params)  # type: ignore[call-arg]

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        """Whether half parameters are accepted: their partitions are fp32."""
        return self.zero is not None or super().supports_memory_efficient_fp16  # type: ignore[misc]

    @property
    def is_apart(self) -> bool:
        """Whether a rank has only a part of its parameters' state."""
        return self.zero is not None and self.zero.are_apart

    def model_params(self) -> list[nn.Parameter]:
        """Return the model's parameters, in the order of the state's indices."""
        if self.zero is None:
            return super().model_params()
        return [partition.parameter for partition in self.zero.partitions]

    def zero_grad(self) -> None:
        """Reset the gradients of the model's parameters and partitions."""
        super().zero_grad()  # type: ignore[misc]
        if self.zero is not None:
            self.zero.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; under stage 2 gradients are reduced during it."""
        super().backward(loss)  # type: ignore[misc]
        self.finish_backward()

    def finish_backward(self) -> None:
        """Reduce the remaining gradients of a backward pass, for a wrapper that runs it itself."""
        if self.zero is not None:
            self.zero.finish_backward()

    def all_reduce_grads(self, module: Any) -> None:
        """Reduce the gradients of all parameters, a criterion's included, to their owners."""
        if self.zero is None or self.zero.stage == 0:
            super().all_reduce_grads(module)
        else:
            self.zero.reduce()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients, when the step converts them to fp32."""
        if self.zero is None:
            super().multiply_grads(c)  # type: ignore[misc]
        else:
            self.zero.multiply(c)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """Clip by the norm over all ranks' partitions; return it."""
        if self.zero is None:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        self.times_clipped += 1
        return self.zero.clip(max_norm)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the partitions, then the weights of all ranks."""
        update = super().step
        if self.zero is None:
            update(*args, **kwargs)
        else:
            self.zero.step(self.optimizer, lambda: update(*args, **kwargs))

    def expert_state(self, index: int) -> dict[str, Tensor]:
        """Return the state of this rank's experts. Collective over their replicas, which share it."""
        if self.zero is None:
            return super().expert_state(index)
        # A GPU's collectives cannot read host memory.
        device = self.zero.partitions[index].parameter.device
        return {key: value.to(device) for key, value in self._whole_tensors(index).items()}

    def save_state(self, state: dict[int, dict[str, Any]], topology: Topology) -> None:
        """Include these, and other sharded state, in rank 0's next `state_dict`. Collective."""
        super().save_state(state, topology)
        if not self.is_apart:
            return
        for index in range(len(self.model_params())):
            if index in state:
                continue
            whole = self._whole_tensors(index)
            if self._gathered_state is not None:
                self._gathered_state[index] = {key: value.cpu() for key, value in whole.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; a part that was not gathered is marked."""
        state_dict = super().state_dict()
        if self.is_apart and self._gathered_state is None:
            state_dict[ONLY_OF_RANK] = RUN.topology.rank
        return state_dict

    def _whole_tensors(self, index: int) -> dict[str, Tensor]:
        assert self.zero is not None
        state = self.optimizer.state.get(self.zero.parameters[index], {})
        whole = self.zero.whole_state(index, state)
        shape = self.zero.partitions[index].parameter.shape
        return {key: whole[key] for key in sorted(whole) if getattr(whole[key], "shape", None) == shape}

    def _complete_state(self, state: dict[int, dict[str, Any]]) -> None:
        """Give state that is whole on this rank its parameter's shape, in place."""
        if self.zero is None:
            return
        for index, partition in enumerate(self.zero.partitions):
            if partition.share.size == 1:
                whole = self.zero.whole_state(index, state.get(index, {}))
                if whole:
                    state[index] = whole

    def _cut_state(self, state: dict[int, dict[str, Any]]) -> None:
        """Keep this rank's part of a loaded state, in place."""
        if self.zero is None:
            return
        for index in state.keys() & range(len(self.zero.partitions)):
            state[index] = self.zero.own_state(index, state[index])


class ZeroFP16Optimizer(MemoryEfficientFP16Optimizer):
    """Replaces fairseq's FP16Optimizer, which copies all parameters and gradients to fp32.

    The arithmetic is the same: fp32 masters, rounded to the model's weights after every step. The wrapped
    optimizer gets half parameters and keeps fp32 partitions.
    """

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the scaled loss."""
        super().backward(loss)
        self.wrapped_optimizer.finish_backward()

    def load_state_dict(self, state_dict: dict, optimizer_overrides: dict | None = None) -> Any:
        """Load a state; fairseq would replace the loaded tensors by the file's."""
        self.optimizer.disable_mem_eff_fp16_loading_hack = True
        super().load_state_dict(state_dict, optimizer_overrides)


# The Trainer refuses a checkpoint of an optimizer with another name, and these two read each other's.
ZeroFP16Optimizer.__name__ = "FP16Optimizer"
