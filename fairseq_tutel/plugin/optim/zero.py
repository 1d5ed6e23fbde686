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
    """The ZeRO stage (0 to 2), and whether the optimizer state is in host memory."""

    stage: int
    offload: bool


def zero_options(cfg: Any) -> ZeroOptions | None:
    """Return the ZeRO and offload options, or None if neither is used or the model has no experts.

    `cfg` is a FairseqConfig, its section `optimizer`, or the argparse namespace of an optimizer without a
    dataclass. On one rank, the returned ZeRO stage is 0.
    """
    if hasattr(cfg, "_get_root"):
        root = cfg._get_root()
        cfg = root.task if "task" in root else cfg
    options = read(TaskConfig, cfg)
    refuse_bad_values(options)
    # A model without experts creates no process groups; the task warns that ZeRO has no effect.
    ranks = world.size()
    stage = options.moe_zero_stage if ranks > 1 else 0
    if not (stage or options.moe_offload_optimizer) or RUN.topology.world_size != ranks:
        return None
    return ZeroOptions(stage, options.moe_offload_optimizer)


class ZeroFP16Optimizer(MemoryEfficientFP16Optimizer):
    """The fp16 and bf16 optimizer for ZeRO, which replaces fairseq's FP16Optimizer.

    FP16Optimizer copies all parameters and gradients to fp32. In ZeroFP16Optimizer, the wrapped optimizer
    gets half-precision parameters, keeps fp32 partitions, and makes the same updates as FP16Optimizer.
    """

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss, and finish the reduction of gradients."""
        super().backward(loss)
        self.wrapped_optimizer.finish_backward()

    def load_state_dict(self, state_dict: dict, optimizer_overrides: dict | None = None) -> Any:
        """Load an optimizer state; disable fairseq's hack, which overwrites it with the file's tensors."""
        self.optimizer.disable_mem_eff_fp16_loading_hack = True
        super().load_state_dict(state_dict, optimizer_overrides)


def half_optimizer(cfg: Any, params: list[Any]) -> Any:
    """Build the MoE optimizer that a FairseqConfig names, for half-precision parameters.

    fairseq's two half-precision wrappers do not work with ZeRO. FP16Optimizer copies all parameters to
    fp32, although a rank needs only its partition. The wrapper of --memory-efficient-fp16 saves another
    optimizer name, so runs with and without ZeRO could not read each other's checkpoints.
    """
    if zero_options(cfg) is not None:
        return ZeroFP16Optimizer.build_optimizer(cfg, params)
    optimizer = FP16Optimizer.build_optimizer(cfg, params)
    optimizer.fp32_optimizer.holds_masters = True
    return optimizer


# fairseq's Trainer rejects a checkpoint with another optimizer class name, but ZeroFP16Optimizer and
# FP16Optimizer can read each other's checkpoints.
ZeroFP16Optimizer.__name__ = "FP16Optimizer"
