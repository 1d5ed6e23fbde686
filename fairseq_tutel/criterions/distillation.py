"""The criterion moe_distillation, which adds a distillation loss to another criterion's loss.

--distill-criterion names the other criterion; its class is combined with `DistillationMixin`. The
distillation loss is T² KL(teacher || student), and is added until --distill-until.
N tokens of a micro-batch, padding included, V words.
"""

import dataclasses
import hashlib
import logging
import math
from typing import Any, NamedTuple

import torch
from fairseq.criterions import (
    CRITERION_DATACLASS_REGISTRY,
    CRITERION_REGISTRY,
    FairseqCriterion,
    register_criterion,
)
from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_tutel.checkpoint.files import identity
from fairseq_tutel.criterions import variants  # noqa: F401 - must be registered first
from fairseq_tutel.criterions.teacher import Teacher, scores_of
from fairseq_tutel.distillation.loss import Answers, distillation_loss, top_answers
from fairseq_tutel.distillation.options import DistillationConfig
from fairseq_tutel.distillation.stored_logits import StoredLogits, fingerprint
from fairseq_tutel.options.option import options_in, plain, read, refuse_bad_values
from fairseq_tutel.plugin.registration.flags import made
from fairseq_tutel.plugin.run_state import config_of, is_opened
from fairseq_tutel.plugin.training.task import give_mixin
from fairseq_tutel.ranks import world

logger = logging.getLogger(__name__)

# Criterions that can be combined with distillation. They call the model once and sum the loss over rows of
# scores, one row per target. Their MoE variants work, too. docs/ensembles.md explains why others do not.
STOCK = (
    "cross_entropy",
    "label_smoothed_cross_entropy",
    "label_smoothed_cross_entropy_with_alignment",
    "label_smoothed_cross_entropy_with_ctc",
    "adaptive_loss",
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
    _source: "_Source | None" = None  # not an nn.Module, so its parameters are not trained or saved
    _update, _is_dummy = 0, False

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Build the wrapped criterion, and check the options of the teacher."""
        criterion = super().build_criterion(cfg, task)  # type: ignore[misc]
        criterion.distillation = read(DistillationConfig, cfg)
        if not is_opened(config_of(task)):  # fairseq-validate needs no teacher
            give_mixin(task)  # fairseq's own tasks do not call `begin_step`
            criterion._source = _Source(criterion.distillation, task)
        return criterion

    def begin_step(self, update_num: int, is_dummy: bool) -> None:
        """Store the number of finished updates, and whether the micro-batch is a dummy batch."""
        self._update, self._is_dummy = update_num, is_dummy

    def forward(self, model: nn.Module, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss with the distillation loss added, the sample size and the logging output."""
        options = self.distillation
        if options.distill_until and self._update >= options.distill_until and self._source:
            logger.info("distillation ended after %d updates", options.distill_until)
            self._source = None
        distills = self.training or options.distill_in_validation
        if self._source is None or not distills:
            return super().forward(model, sample, *args, **kwargs)  # type: ignore[misc]
        calls: list[tuple] = []
        hook = model.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        try:
            loss, sample_size, log = super().forward(model, sample, *args, **kwargs)  # type: ignore[misc]
        finally:
            hook.remove()
        words, named, output = calls[-1]
        scores_NV, counts = scores_of(model, output), self._counting(sample["target"])
        dummy = self.training and self._is_dummy
        call = _Call(sample, counts, words, named, scores_NV, self.padding_idx, dummy)
        teacher = self._source.answers(call, stored=self.training)
        kl = loss.new_zeros(())
        if teacher is not None:
            kl = distillation_loss(scores_NV, teacher, call.counts_N, options.distill_temperature)
            loss = loss + options.distill_alpha * kl
        log["loss"] = log["loss"] + options.distill_alpha * kl.detach()
        log["distill_loss"] = kl.detach()
        return loss, sample_size, log

    def _counting(self, target: Tensor) -> Tensor:
        """Return a bool mask [...] of targets that are neither padding nor part of an ignored prefix."""
        if hasattr(self, "classification_head_name"):  # one class has the same number as padding
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


class _Call(NamedTuple):
    """Stores the batch, the arguments and the output of one forward pass of the student model."""

    sample: Any
    counts: Tensor  # [...] bool, true for target positions that count in the loss
    words: tuple  # positional arguments of the forward pass
    named: dict[str, Any]
    scores_NV: Tensor  # the student's scores, for all positions or only for positions with a target
    padding: int
    dummy: bool  # a dummy batch, which only keeps ranks synchronized

    @property
    def counts_N(self) -> Tensor:  # noqa: N802 - a shape
        """A bool mask [N] over the rows of `scores_NV`, true for rows that count in the loss."""
        is_whole = self.counts.numel() == len(self.scores_NV)
        return self.counts.flatten() if is_whole else self.counts.new_ones(len(self.scores_NV))

    def texts(self) -> list[tuple[int, bytes, int]]:
        """Return, for each sentence, its ID in the data set, a hash of its text, and its token count."""
        ids, source = self.sample.get("id"), self.sample["net_input"].get("src_tokens")
        if ids is None or source is None or self.counts.dim() != 2:
            raise ValueError(
                "--distill-logits needs sentences with IDs, but this task does not provide them; remove "
                "--distill-logits."
            )
        padding = 0 if source.is_floating_point() else self.padding  # audio has no padding symbol
        tables = (source.cpu(), self.sample["target"].cpu(), self.counts.cpu())
        return [
            (i, fingerprint(s[s != padding], t[counts]), int(counts.sum()))
            for i, s, t, counts in zip(ids.tolist(), *tables, strict=True)
        ]


class _Source:
    """Provides teacher predictions from a folder of stored logits, from a teacher model, or from both."""

    def __init__(self, options: DistillationConfig, task: Any) -> None:
        self.options, path = options, options.distill_teacher
        if not (path or options.distill_logits):
            raise ValueError(
                "--criterion moe_distillation needs a teacher; give --distill-teacher CHECKPOINT, or "
                "--distill-logits FOLDER with stored teacher logits."
            )
        if options.distill_logits and not options.distill_top_k:
            raise ValueError(
                "--distill-logits stores only the most likely words of each token, but their number is not "
                "given; give --distill-top-k, such as 16."
            )
        self.teacher = Teacher(options, task) if path else None
        if self.teacher is None and options.distill_in_validation:
            raise ValueError(
                "--distill-in-validation needs a teacher model, because --distill-logits has logits of the "
                "training set only; add --distill-teacher, or remove --distill-in-validation."
            )
        self.store: StoredLogits | None = None
        if options.distill_logits:
            words = getattr(task.target_dictionary, "symbols", None)
            facts = {
                "the dictionary": hashlib.sha256(repr(words).encode()).hexdigest()[:16],
                "the teacher": identity(path)[:16] if path else None,
                "--distill-top-k": options.distill_top_k,
                "--distill-temperature": options.distill_temperature,
            }
            self.store = StoredLogits(options.distill_logits, facts, options.distill_top_k)

    def answers(self, call: _Call, stored: bool) -> Tensor | Answers | None:
        """Return the teacher's scores [N, V] or its top-K predictions; return None for a dummy batch."""
        # All ranks of the teacher's EP group must call the teacher equally often.
        in_step = self.teacher is not None and self.options.distill_teacher_parallel_size > 1
        if call.dummy and not in_step:
            return None
        store = self.store if stored else None
        if store is None:
            return self._asked(call)
        texts = [] if call.dummy else call.texts()
        found = [store.read(sample, text) for sample, text, _ in texts]
        missing = any(answer is None for answer in found)
        if in_step:
            missing = any(world.all_gather_object(missing, "the search for stored teacher logits"))
        if not missing:
            return None if call.dummy else _put(found, call)  # type: ignore[arg-type]
        if self.teacher is None:
            sample = texts[found.index(None)][0]
            raise ValueError(
                f"--distill-logits is {self.options.distill_logits}, which has no logits of sample "
                f"{sample}; add --distill-teacher to compute and store them."
            )
        top_k, scored = self.options.distill_top_k, call.scores_NV.shape[1]
        if top_k > scored:  # a stored record always has K entries
            raise ValueError(
                f"--distill-top-k is {top_k}, but the model has {scored} words or classes; lower it."
            )
        answers = self._asked(call)
        if not call.dummy:
            of_each = _split(answers, call.counts_N, [tokens for *_, tokens in texts])
            for (sample, text, _), before, own in zip(texts, found, of_each, strict=True):
                if before is None:
                    store.write(sample, text, own)
        return answers

    def _asked(self, call: _Call) -> Any:
        """Run the teacher; return its scores [N, V], or its most likely words if --distill-top-k is set."""
        assert self.teacher is not None
        scores_NV = self.teacher.scores(call.words, call.named, call.scores_NV.device, call.dummy)
        if scores_NV.shape != call.scores_NV.shape:
            raise ValueError(
                f"--distill-teacher gives scores of shape {tuple(scores_NV.shape)}, but the student gives "
                f"{tuple(call.scores_NV.shape)}; give a teacher with the same task and dictionary."
            )
        top_k = self.options.distill_top_k
        return top_answers(scores_NV, top_k, self.options.distill_temperature) if top_k else scores_NV


def _split(answers: Answers, counts_N: Tensor, tokens: list[int]) -> list[Answers]:
    parts = (table[counts_N].split(tokens) for table in (answers.words_NK.cpu(), answers.logs_NK.cpu()))
    return [Answers(*part) for part in zip(*parts, strict=True)]


def _put(found: list[Answers], call: _Call) -> Answers:
    counts_N = call.counts_N
    words, logs = (
        torch.cat(parts).to(counts_N.device)
        for parts in zip(*((a.words_NK, a.logs_NK) for a in found), strict=True)
    )
    words_NK = words.new_zeros(len(counts_N), words.shape[1])
    logs_NK = logs.new_zeros(len(counts_N), words.shape[1])
    words_NK[counts_N], logs_NK[counts_N] = words, logs
    return Answers(words_NK, logs_NK)


# Each class has the name of the wrapped criterion: fairseq resumes only with a criterion of the same name,
# and after --distill-until a run may resume with the wrapped criterion.
_WITH_MIXIN = {
    name: type(
        CRITERION_REGISTRY[name].__name__,
        (DistillationMixin, CRITERION_REGISTRY[name]),
        {"__module__": __name__},
    )
    for name in WRAPPED
}
DistillationOptions = made("DistillationOptions", options_in(DistillationConfig))
# The flags of every criterion that can be wrapped, MoE variants first.
_Options = dataclasses.make_dataclass(
    "MoEDistillationConfig",
    [],
    bases=(DistillationOptions, *(CRITERION_DATACLASS_REGISTRY[n] for n in WRAPPED if n[:4] == "moe_")),
    namespace={"__module__": __name__},
)


@register_criterion("moe_distillation", dataclass=_Options)
class MoEDistillationCriterion(FairseqCriterion):
    """Builds the criterion that --distill-criterion names, and adds the distillation loss to it."""

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
        if name.startswith("moe_") and not getattr(task, "_has_experts", False):
            raise ValueError(
                f"--distill-criterion is {name}, but the student has no experts; give "
                f"{name.removeprefix('moe_')}."
            )
        return _WITH_MIXIN[name].build_criterion(cfg, task)  # type: ignore[attr-defined]
