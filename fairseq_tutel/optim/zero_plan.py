"""What --moe-zero-stage and --moe-offload-optimizer ask for, and what cannot go with it."""

from dataclasses import dataclass
from typing import Any

from fairseq_tutel.moe.config import TaskConfig
from fairseq_tutel.moe.options import read, refuse_bad_values
from fairseq_tutel.ranks import groups, world

# Their updates are no function of one element, so a rank that holds a part of the experts goes astray.
NOT_ELEMENTWISE = ("adafactor", "lamb", "composite")


@dataclass(frozen=True)
class ShardPlan:
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


def plan_of(cfg: Any) -> ShardPlan | None:
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
    return ShardPlan(stage, options.moe_offload_optimizer)


def refuse_with_shards(root: Any, plan: ShardPlan) -> None:
    """Refuse what an optimizer of shards cannot do.

    Args:
        root: the FairseqConfig of a training.
        plan: of it.

    Raises:
        ValueError: naming option, value and fix.
    """
    common, name = root.common, str(root.optimizer._name)
    bad = [
        (
            name.removeprefix("moe_") in NOT_ELEMENTWISE,
            f"--optimizer is {name}, whose updates look at whole parameters, and {plan.flags} hands it "
            "parts of them; use moe_adam, or drop the latter.",
        ),
        (
            getattr(root.optimizer, "fp16_adam_stats", False),
            f"--fp16-adam-stats is set, whose scales hold for whole parameters, and {plan.flags} cuts "
            "them; drop one of the two.",
        ),
        (
            common.amp,
            f"--amp is set, whose scaler looks at a rank's own gradients, and {plan.flags} moves them to "
            "other ranks; use --fp16 or --bf16.",
        ),
        *(
            (
                common[f"memory_efficient_{precision}"],
                f"--memory-efficient-{precision} is set, which keeps no fp32 masters, and {plan.flags} "
                f"keeps them apart; use --{precision}.",
            )
            for precision in ("fp16", "bf16")
        ),
        (
            root.optimization.use_bmuf,
            f"--use-bmuf is set, which averages whole weights by itself; drop it or {plan.flags}.",
        ),
    ]
    for wrong, message in bad:
        if wrong:
            raise ValueError(message)
