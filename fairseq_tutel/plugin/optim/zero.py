"""ZeRO and optimizer offload for fairseq's optimizers: options, checks, and the fp16 wrapper."""

from dataclasses import dataclass
from typing import Any

from fairseq.optim import FP16Optimizer, MemoryEfficientFP16Optimizer
from torch import Tensor

from fairseq_tutel.option import read, refuse_bad_values
from fairseq_tutel.parallel import world
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.plugin.training.options import TaskConfig


@dataclass(frozen=True)
class ZeroOptions:
    """The ZeRO stage (0 to 2), and whether the optimizer state is in host memory; see `ZeroState`."""

    stage: int
    offload: bool


def zero_options(cfg: Any) -> ZeroOptions | None:
    """Return the ZeRO and offload options; None if neither is used or the model has no experts.

    `cfg` is a FairseqConfig, its optimizer section, or an old optimizer's namespace. On one rank the stage
    is 0.
    """
    if hasattr(cfg, "_get_root"):
        root = cfg._get_root()
        cfg = root.task if "task" in root else cfg
    options = read(TaskConfig, cfg)
    refuse_bad_values(options)
    # A model without experts created no groups; the task warns that these options have no effect.
    ranks = world.size()
    stage = options.moe_zero_stage if ranks > 1 else 0
    if not (stage or options.moe_offload_optimizer) or RUN.topology.world_size != ranks:
        return None
    return ZeroOptions(stage, options.moe_offload_optimizer)


class ZeroFP16Optimizer(MemoryEfficientFP16Optimizer):
    """The fp16 and bf16 optimizer for ZeRO, which replaces fairseq's FP16Optimizer.

    FP16Optimizer copies all parameters and gradients to fp32. In this class, the wrapped optimizer gets
    half-precision parameters and keeps fp32 partitions. The results are the same.
    """

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss, and finish the reduction of gradients."""
        super().backward(loss)
        self.wrapped_optimizer.finish_backward()

    def load_state_dict(self, state_dict: dict, optimizer_overrides: dict | None = None) -> Any:
        """Load an optimizer state, and prevent fairseq from replacing its tensors by those of the file."""
        self.optimizer.disable_mem_eff_fp16_loading_hack = True
        super().load_state_dict(state_dict, optimizer_overrides)


def half_optimizer(cfg: Any, params: list[Any]) -> Any:
    """Build the MoE optimizer of half-precision parameters that a FairseqConfig names.

    fairseq's two wrappers do not work with ZeRO. FP16Optimizer copies all parameters to fp32, although a
    rank needs only its partition. The wrapper of --memory-efficient-fp16 saves another optimizer name, so
    runs with and without ZeRO could not read each other's checkpoints.
    """
    if zero_options(cfg) is not None:
        return ZeroFP16Optimizer.build_optimizer(cfg, params)
    optimizer = FP16Optimizer.build_optimizer(cfg, params)
    optimizer.fp32_optimizer.holds_masters = True
    return optimizer


# fairseq's Trainer rejects a checkpoint if the optimizer's class name differs. Both classes can read it.
ZeroFP16Optimizer.__name__ = "FP16Optimizer"
