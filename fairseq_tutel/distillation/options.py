"""The options of distillation: which teacher a student learns from, how much, and until when."""

from dataclasses import dataclass
from functools import partial

from fairseq_tutel.moe.options import AT_LEAST_0, AT_LEAST_1, POSITIVE, option

distillation = partial(option, theme="Distillation", of="criterion")


@dataclass(frozen=True)
class DistillationConfig:
    """What the criterion moe_distillation does beside the criterion that it goes before."""

    distill_criterion: str = distillation(
        "moe_cross_entropy",
        "the criterion whose loss the student is trained by; its own flags are taken too, and it alone is "
        "left after --distill-until",
    )
    distill_teacher: str = distillation(
        "",
        "the teacher's checkpoint, dense or with experts, of one file or sharded; it is opened when it is "
        "first asked",
    )
    distill_teacher_overrides: str = distillation(
        "{}",
        "options that the teacher is opened with in place of its own and the run's, as fairseq's "
        "--model-overrides: {'moe_expert_store': 'on-demand'} leaves its experts in the file",
    )
    distill_teacher_bf16: bool = distillation(False, "let the teacher compute in bf16")
    distill_teacher_parallel_size: int = distillation(
        1, "how many ranks share the teacher's experts", unit="ranks", rule=AT_LEAST_1
    )
    distill_alpha: float = distillation(
        1.0,
        "weight of T² KL(teacher || student), summed over tokens, beside the criterion's loss",
        rule=POSITIVE,
    )
    distill_temperature: float = distillation(
        1.0, "T, by which the logits of both are divided", rule=POSITIVE
    )
    distill_until: int = distillation(
        0,
        "how many updates learn from the teacher; the criterion's loss alone trains after them; 0 is for "
        "all",
        unit="updates",
        rule=AT_LEAST_0,
    )
    distill_top_k: int = distillation(
        0,
        "take the teacher's likeliest words alone, and what is left of its probability as one word more; "
        "0 is for all words",
        unit="words",
        rule=AT_LEAST_0,
    )
    distill_logits: str = distillation(
        "",
        "the folder of the teacher's answers to the training set, the --distill-top-k words of each "
        "token: what is there is read, what is not is asked of --distill-teacher and written, and without "
        "a teacher refused",
    )
    distill_in_validation: bool = distillation(
        False, "ask the teacher in validation too, and log distill_loss there"
    )
