"""The options of knowledge distillation."""

from dataclasses import dataclass
from functools import partial

from fairseq_tutel.option import AT_LEAST_0, AT_LEAST_1, POSITIVE, option

distillation = partial(option, theme="Distillation", of="criterion")


@dataclass(frozen=True)
class DistillationConfig:
    """The options of the criterion moe_distillation."""

    distill_criterion: str = distillation(
        "moe_cross_entropy",
        "criterion to which the distillation loss is added; the flags of this criterion are accepted, "
        "too; after --distill-until, only the loss of this criterion is used",
    )
    distill_teacher: str = distillation("", "checkpoint of the teacher (dense or MoE, full or sharded)")
    distill_teacher_overrides: str = distillation(
        "{}",
        "options that override the teacher's saved options, as in fairseq's --model-overrides; for "
        "example, {'moe_expert_store': 'on-demand'} keeps the teacher's experts on disk",
    )
    distill_teacher_bf16: bool = distillation(False, "run the teacher in bf16")
    distill_teacher_parallel_size: int = distillation(
        1, "size of the teacher's EP group", unit="ranks", rule=AT_LEAST_1
    )
    distill_alpha: float = distillation(
        1.0,
        "weight of the distillation loss T² KL(teacher || student), summed over tokens; T is "
        "--distill-temperature",
        rule=POSITIVE,
    )
    distill_temperature: float = distillation(
        1.0, "temperature T by which the logits of teacher and student are divided", rule=POSITIVE
    )
    distill_until: int = distillation(
        0, "number of updates with the distillation loss; 0: all updates", unit="updates", rule=AT_LEAST_0
    )
    distill_in_validation: bool = distillation(
        False, "also run the teacher in validation, and log distill_loss"
    )
