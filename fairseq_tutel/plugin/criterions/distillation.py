"""The criterion moe_distillation, which adds a distillation loss to another criterion's loss.

--distill-criterion names the criterion to extend, whose class is combined with `DistillationMixin`. The
distillation loss is T² KL(teacher || student) with the temperature T. After the update --distill-until,
this loss is no longer added. Shape suffixes are N (tokens, padding included) and V (words).
"""

import dataclasses
import logging
import math
from typing import Any

import torch
from fairseq.criterions import (
    CRITERION_DATACLASS_REGISTRY,
    CRITERION_REGISTRY,
    FairseqCriterion,
    register_criterion,
)
from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_tutel.option import options_in, plain, read, refuse_bad_values
from fairseq_tutel.plugin.criterions import variants  # noqa: F401 - must be registered first
from fairseq_tutel.plugin.criterions.distillation_loss import distillation_loss
from fairseq_tutel.plugin.criterions.teacher import Teacher, scores_of
from fairseq_tutel.plugin.distillation_options import DistillationConfig
from fairseq_tutel.plugin.registration.flags import made
from fairseq_tutel.plugin.run_state import config_of, is_opened
from fairseq_tutel.plugin.training.task import give_mixin

logger = logging.getLogger(__name__)

# Criterions that can be combined with distillation. Each criterion in STOCK calls the model once and sums
# the loss over rows of scores, one row per target. For other criterions, see docs/ensembles.md.
STOCK = (
    "cross_entropy",
    "label_smoothed_cross_entropy",
    "label_smoothed_cross_entropy_with_alignment",
    "label_smoothed_cross_entropy_with_ctc",
    "masked_lm",
    "image_classification",
    "sentence_prediction",
    "sentence_prediction_adapters",
)
WRAPPED = tuple(n for s in STOCK for n in (s, f"moe_{s}") if n in CRITERION_REGISTRY)


class DistillationMixin:
    """Mixin that adds the distillation loss to the loss of a criterion that calls the model only once."""

    distillation: DistillationConfig
    task: Any
    padding_idx: int
    training: bool
    _teacher: Teacher | None = None  # The teacher is not trained or saved.
    _update, _is_dummy = 0, False

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Build the wrapped criterion, and check the options of the teacher."""
        criterion = super().build_criterion(cfg, task)  # type: ignore[misc]
        criterion.distillation = read(DistillationConfig, cfg)
        if not is_opened(config_of(task)):  # fairseq-validate needs no teacher.
            give_mixin(task)  # fairseq's tasks do not call the criterion's `begin_step`.
            criterion._teacher = Teacher(criterion.distillation, task)
        return criterion

    def begin_step(self, update_num: int, is_dummy: bool) -> None:
        """Store the number of finished updates, and whether the micro-batch is a dummy batch."""
        self._update, self._is_dummy = update_num, is_dummy

    def forward(self, model: nn.Module, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss with the distillation loss added, the sample size and the logging output."""
        options = self.distillation
        if options.distill_until and self._update >= options.distill_until and self._teacher:
            logger.info("distillation ended after %d updates", options.distill_until)
            self._teacher = None
        distills = self.training or options.distill_in_validation
        if self._teacher is None or not distills:
            return super().forward(model, sample, *args, **kwargs)  # type: ignore[misc]
        calls: list[tuple] = []
        hook = model.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        try:
            loss, sample_size, log = super().forward(model, sample, *args, **kwargs)  # type: ignore[misc]
        finally:
            hook.remove()
        words, named, output = calls[-1]
        scores_NV, kl = scores_of(output), loss.new_zeros(())
        dummy = self.training and self._is_dummy
        # All ranks of the teacher's EP group must call the teacher equally often.
        if not dummy or options.distill_teacher_parallel_size > 1:
            teacher_NV = self._teacher.scores(words, named, scores_NV.device, dummy)
            if teacher_NV.shape != scores_NV.shape:
                raise ValueError(
                    f"--distill-teacher gives scores of shape {tuple(teacher_NV.shape)}, but the student "
                    f"gives {tuple(scores_NV.shape)}; give a teacher with the same task and dictionary."
                )
            counts_N = self._counting(sample["target"]).flatten()
            if len(counts_N) != len(scores_NV):  # Some models score only positions that have a target.
                counts_N = counts_N.new_ones(len(scores_NV))
            kl = distillation_loss(scores_NV, teacher_NV, counts_N, options.distill_temperature)
            loss = loss + options.distill_alpha * kl
        log["loss"] = log["loss"] + options.distill_alpha * kl.detach()
        log["distill_loss"] = kl.detach()
        return loss, sample_size, log

    def _counting(self, target: Tensor) -> Tensor:
        """Return a bool mask [...] of targets that are neither padding nor part of an ignored prefix."""
        if hasattr(self, "classification_head_name"):  # Class labels have no padding.
            return torch.ones_like(target, dtype=torch.bool)
        counts = target != self.padding_idx
        counts[..., : getattr(self, "ignore_prefix_size", 0)] = False
        return counts

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the wrapped criterion's metrics, and the distillation loss in bits per token or sample."""
        super().reduce_metrics(logging_outputs)  # type: ignore[misc]
        key = "distill_loss"
        if any(key in log for log in logging_outputs):
            total = sum(log.get(key, 0) for log in logging_outputs)
            size = sum(log.get("sample_size", 0) for log in logging_outputs)
            metrics.log_scalar(key, total / size / math.log(2), size, round=3)


# A criterion with distillation keeps the name of the wrapped criterion, because fairseq resumes a run only
# with a criterion of the same name. After --distill-until, a run may resume with the wrapped criterion.
_WITH_MIXIN = {
    name: type(
        CRITERION_REGISTRY[name].__name__,
        (DistillationMixin, CRITERION_REGISTRY[name]),
        {"__module__": __name__},
    )
    for name in WRAPPED
}
DistillationOptions = made("DistillationOptions", options_in(DistillationConfig))
# The options of moe_distillation include those of all MoE variants that can be wrapped. A MoE variant has
# the options of its stock criterion, too.
_Options = dataclasses.make_dataclass(
    "MoEDistillationConfig",
    [],
    bases=(DistillationOptions, *(CRITERION_DATACLASS_REGISTRY[n] for n in WRAPPED if n[:4] == "moe_")),
    namespace={"__module__": __name__},
)


@register_criterion("moe_distillation", dataclass=_Options)
class MoEDistillationCriterion(FairseqCriterion):
    """Builds the criterion that --distill-criterion names, and adds the distillation loss to its loss."""

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Build the criterion that --distill-criterion names, with `DistillationMixin`."""
        refuse_bad_values(read(DistillationConfig, cfg))
        name = plain(cfg.distill_criterion)
        if name not in _WITH_MIXIN:
            raise ValueError(f"--distill-criterion is {name}; choose one of {', '.join(_WITH_MIXIN)}.")
        if "sentence" in name and cfg.regression_target:
            raise ValueError(
                "--regression-target is set, so the model returns numbers, but distillation needs "
                "probabilities; remove --regression-target or --criterion moe_distillation."
            )
        return _WITH_MIXIN[name].build_criterion(cfg, task)  # type: ignore[attr-defined]
