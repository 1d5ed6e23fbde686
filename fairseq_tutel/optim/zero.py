"""A fairseq optimizer of partitions: ZeRO beside experts, and optimizer state in host memory.

Here is what --moe-zero-stage and --moe-offload-optimizer ask for and what cannot go with it, the mixin of
every optimizer, and fairseq's loss scaling around one that keeps the fp32 masters itself.
"""

import logging
from dataclasses import dataclass
from typing import Any

from fairseq.optim import MemoryEfficientFP16Optimizer
from torch import Tensor, nn

from fairseq_tutel.moe.config import TaskConfig
from fairseq_tutel.moe.options import read, refuse_bad_values
from fairseq_tutel.optim.moe_optimizer import ONLY_OF_RANK, MoEOptimizerMixin
from fairseq_tutel.ranks import groups, world
from fairseq_tutel.ranks.groups import Topology
from fairseq_tutel.zero.state import ZeroState

logger = logging.getLogger(__name__)

# Their updates are no function of one element, so a rank that holds a part of the experts goes astray.
NOT_ELEMENTWISE = ("adafactor", "lamb", "composite")


@dataclass(frozen=True)
class ZeroOptions:
    """How optimizer state is kept.

    Attributes:
        stage: 0 whole on every rank, 1 cut, 2 gradients cut too.
        offload: in host memory.
    """

    stage: int
    offload: bool

    @property
    def flags(self) -> str:
        """The flags that ask for it."""
        asked = [f"--moe-zero-stage {self.stage}"] if self.stage else []
        return " ".join(asked + ["--moe-offload-optimizer"] * self.offload)


def zero_options(cfg: Any) -> ZeroOptions | None:
    """Return what is asked for; None for an optimizer as ever, and for a model without experts.

    On one rank there is nobody to share with, and the stage is 0.

    Args:
        cfg: the FairseqConfig, or an optimizer's part of it; fairseq's older optimizers have the whole
            command line.

    Raises:
        ValueError: no such stage, or another bad value.
    """
    if hasattr(cfg, "_get_root"):
        root = cfg._get_root()
        cfg = root.task if "task" in root else cfg
    options = read(TaskConfig, cfg)
    refuse_bad_values(options)
    # The task warns that its options have no effect on a model without experts, which asked for no groups.
    ranks = world.size()
    stage = options.moe_zero_stage if ranks > 1 else 0
    if not (stage or options.moe_offload_optimizer) or groups.in_use().world_size != ranks:
        return None
    return ZeroOptions(stage, options.moe_offload_optimizer)


def refuse_with_zero(root: Any, asked: ZeroOptions) -> None:
    """Refuse what an optimizer of partitions cannot do.

    Args:
        root: the FairseqConfig of a training.
        asked: of it.

    Raises:
        ValueError: naming option, value and fix.
    """
    common, name = root.common, str(root.optimizer._name)
    bad = [
        (
            name.removeprefix("moe_") in NOT_ELEMENTWISE,
            f"--optimizer is {name}, whose updates look at whole parameters, and {asked.flags} hands it "
            "parts of them; use moe_adam, or drop the latter.",
        ),
        (
            getattr(root.optimizer, "fp16_adam_stats", False),
            f"--fp16-adam-stats is set, whose scales hold for whole parameters, and {asked.flags} cuts "
            "them; drop one of the two.",
        ),
        (
            common.amp,
            f"--amp is set, whose scaler looks at a rank's own gradients, and {asked.flags} moves them to "
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
            f"--use-bmuf is set, which averages whole weights by itself; drop it or {asked.flags}.",
        ),
    ]
    for wrong, message in bad:
        if wrong:
            raise ValueError(message)


class ZeroOptimizerMixin(MoEOptimizerMixin):
    """Goes before a FairseqOptimizer class; not asked for ZeRO or offload, it is its base.

    The stock optimizer is built on the partitions; whoever wraps this one sees an ordinary optimizer of the
    model's parameters, and a checkpoint holds an ordinary state.
    """

    zero: ZeroState | None = None

    def __init__(self, cfg: Any, params: Any) -> None:
        options = zero_options(cfg)
        if options is not None:
            topology = groups.in_use()
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
        """Whether half parameters can be given: what is owned of them is fp32."""
        return self.zero is not None or super().supports_memory_efficient_fp16  # type: ignore[misc]

    @property
    def is_apart(self) -> bool:
        """Whether a rank alone has not all of its parameters' state."""
        return self.zero is not None and self.zero.are_apart

    def model_params(self) -> list[nn.Parameter]:
        """Return the model's parameters, in the order of the state's indices."""
        if self.zero is None:
            return super().model_params()
        return [partition.parameter for partition in self.zero.partitions]

    def zero_grad(self) -> None:
        """Forget the gradients of the model's parameters and partitions."""
        super().zero_grad()  # type: ignore[misc]
        if self.zero is not None:
            self.zero.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Run the backward; under stage 2 gradients leave meanwhile."""
        super().backward(loss)  # type: ignore[misc]
        self.finish_backward()

    def finish_backward(self) -> None:
        """Send what a backward left; for a wrapper that runs it itself."""
        if self.zero is not None:
            self.zero.finish_backward()

    def all_reduce_grads(self, module: Any) -> None:
        """Reduce the gradients of all parameters, a criterion's included, to the ranks that keep them."""
        if self.zero is None or self.zero.stage == 0:
            super().all_reduce_grads(module)
        else:
            self.zero.reduce()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients, when the step widens them."""
        if self.zero is None:
            super().multiply_grads(c)  # type: ignore[misc]
        else:
            self.zero.multiply(c)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        """Clip by the one norm over all ranks' partitions; return it."""
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
        """Return the state of this rank's experts; collective over their replicas, which share it."""
        if self.zero is None:
            return super().expert_state(index)
        # Not in host memory, where a GPU's collectives do not reach it.
        device = self.zero.partitions[index].parameter.device
        return {key: value.to(device) for key, value in self._whole_tensors(index).items()}

    def save_state(self, state: dict[int, dict[str, Any]], topology: Topology) -> None:
        """Put these, and other state that is apart, into rank 0's next `state_dict`. Collective."""
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
        """Return the optimizer's state; marked where it is a part, which was not gathered."""
        state_dict = super().state_dict()
        if self.is_apart and self._gathered_state is None:
            state_dict[ONLY_OF_RANK] = groups.in_use().rank
        return state_dict

    def _whole_tensors(self, index: int) -> dict[str, Tensor]:
        assert self.zero is not None
        state = self.optimizer.state.get(self.zero.parameters[index], {})
        whole = self.zero.whole_state(index, state)
        shape = self.zero.partitions[index].parameter.shape
        return {
            key: whole[key] for key in sorted(whole) if getattr(whole[key], "shape", None) == shape
        }

    def _complete_state(self, state: dict[int, dict[str, Any]]) -> None:
        """Give what is whole on this rank its parameter's shape, in place."""
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
    """In the place of fairseq's FP16Optimizer, which copies all parameters and gradients to fp32 first.

    Its arithmetic is that one's: fp32 masters, rounded to the model's weights after every step. What
    fairseq wraps here would update half weights; ours are handed half parameters and keep fp32 partitions.
    """

    def backward(self, loss: Tensor) -> None:
        """Run the backward of the scaled loss."""
        super().backward(loss)
        self.wrapped_optimizer.finish_backward()

    def load_state_dict(self, state_dict: dict, optimizer_overrides: dict | None = None) -> Any:
        """Load a state; fairseq would put the file's tensors in the place of what was loaded."""
        self.optimizer.disable_mem_eff_fp16_loading_hack = True
        super().load_state_dict(state_dict, optimizer_overrides)


# The Trainer refuses a checkpoint that an optimizer of another name wrote, and these two read each other's.
ZeroFP16Optimizer.__name__ = "FP16Optimizer"
