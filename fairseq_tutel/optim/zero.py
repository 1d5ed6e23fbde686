"""ZeRO and optimizer offload for fairseq's optimizers: options, checks, and the fp16 wrapper."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fairseq.optim import MemoryEfficientFP16Optimizer
from torch import Tensor

from fairseq_tutel.moe.option_table import TaskConfig
from fairseq_tutel.options.option import read, refuse_bad_values
from fairseq_tutel.plugin.run_state import RUN
from fairseq_tutel.ranks import world

# Optimizers whose update of an element depends on others; a rank with a part of them would diverge.
NOT_ELEMENTWISE = ("adafactor", "lamb", "composite")


@dataclass(frozen=True)
class ZeroOptions:
    """Where optimizer state is kept; see `ZeroState`."""

    stage: int
    offload: bool

    @property
    def flags(self) -> str:
        """The flags, for messages."""
        given = [f"--moe-zero-stage {self.stage}"] if self.stage else []
        return " ".join(given + ["--moe-offload-optimizer"] * self.offload)


def zero_options(cfg: Any) -> ZeroOptions | None:
    """Return the options of a FairseqConfig, an optimizer's section or an old optimizer's command line.

    None is for ordinary optimizers, and for a model without experts. On one rank the stage is 0.
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
            "them; leave out one of the two.",
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


class ZeroFP16Optimizer(MemoryEfficientFP16Optimizer):
    """Replaces fairseq's FP16Optimizer, which copies all parameters and gradients to fp32.

    The arithmetic is the same, but the wrapped optimizer gets half parameters and keeps fp32 partitions.
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
