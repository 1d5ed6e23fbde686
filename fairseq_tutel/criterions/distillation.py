"""moe_distillation: another criterion's loss plus T² KL(teacher || student) until --distill-until.

--distill-criterion names the other criterion. The class that trains is that one with `DistillationMixin`.
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
from fairseq_tutel.criterions import variants  # noqa: F401 - registered before it
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

# Criterions that call the model once for a table of scores with a row per target, and whose loss is a sum
# over these rows; docs/distillation.md has the reasons against others. Their MoE variants are included.
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
    """Precedes a criterion that calls the model once, for scores of its targets: adds the KL term."""

    distillation: DistillationConfig
    task: Any
    padding_idx: int
    training: bool
    _source: "_Source | None" = None  # no module, so that its parameters are not trained or saved
    _update, _is_dummy = 0, False

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Build the wrapped criterion, and check the teacher."""
        criterion = super().build_criterion(cfg, task)  # type: ignore[misc]
        criterion.distillation = read(DistillationConfig, cfg)
        if not is_opened(config_of(task)):  # else fairseq-validate, which needs no teacher
            give_mixin(task)  # a stock task does not call `begin_step`
            criterion._source = _Source(criterion.distillation, task)
        return criterion

    def begin_step(self, update_num: int, is_dummy: bool) -> None:
        """Set the number of earlier updates, and whether the micro-batch only keeps ranks in step."""
        self._update, self._is_dummy = update_num, is_dummy

    def forward(self, model: nn.Module, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Return (loss with the KL term, sample size, logging output)."""
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
        """Return which positions of a target count, [...] bool: all but padding and an ignored prefix."""
        if hasattr(self, "classification_head_name"):  # one of the classes has padding's number
            return torch.ones_like(target, dtype=torch.bool)
        counts = target != self.padding_idx
        counts[..., : getattr(self, "ignore_prefix_size", 0)] = False
        return counts

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log what the criterion logs, and the KL term per unit of sample size, in bits."""
        super().reduce_metrics(logging_outputs)  # type: ignore[misc]
        key = "distill_loss"
        if any(key in log for log in logging_outputs):
            total = sum(log.get(key, 0) for log in logging_outputs)
            size = sum(log.get("sample_size", 0) for log in logging_outputs)
            metrics.log_scalar(key, total / size / math.log(2), size, round=3)


class _Call(NamedTuple):
    """A call of the student."""

    sample: Any
    counts: Tensor  # [...] bool, which positions of the target are trained
    words: tuple  # positional arguments of the call
    named: dict[str, Any]
    scores_NV: Tensor  # the output, for every position or only for those with a target
    padding: int
    dummy: bool  # the micro-batch only keeps ranks in step

    @property
    def counts_N(self) -> Tensor:  # noqa: N802 - a shape
        """[N] bool: which rows of the scores are tokens."""
        is_whole = self.counts.numel() == len(self.scores_NV)
        return self.counts.flatten() if is_whole else self.counts.new_ones(len(self.scores_NV))

    def texts(self) -> list[tuple[int, bytes, int]]:
        """Return ID in the data set, fingerprint, and number of tokens of each sentence."""
        ids, source = self.sample.get("id"), self.sample["net_input"].get("src_tokens")
        if ids is None or source is None or self.counts.dim() != 2:
            raise ValueError(
                "--distill-logits needs sentences with IDs, and this task has none; leave it out."
            )
        padding = 0 if source.is_floating_point() else self.padding  # filter banks
        tables = (source.cpu(), self.sample["target"].cpu(), self.counts.cpu())
        return [
            (i, fingerprint(s[s != padding], t[counts]), int(counts.sum()))
            for i, s, t, counts in zip(ids.tolist(), *tables, strict=True)
        ]


class _Source:
    """The source of a teacher's answers: a folder, a teacher, or a folder that the teacher fills."""

    def __init__(self, options: DistillationConfig, task: Any) -> None:
        self.options, path = options, options.distill_teacher
        if not (path or options.distill_logits):
            raise ValueError(
                "--criterion moe_distillation needs a teacher; give --distill-teacher CHECKPOINT, or "
                "--distill-logits FOLDER with its answers."
            )
        if options.distill_logits and not options.distill_top_k:
            raise ValueError(
                "--distill-logits keeps the likeliest words of a token; give --distill-top-k, such as 16."
            )
        self.teacher = Teacher(options, task) if path else None
        if self.teacher is None and options.distill_in_validation:
            raise ValueError(
                "--distill-in-validation needs the teacher, and --distill-logits has answers to the "
                "training set alone; give --distill-teacher too, or leave it out."
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
        """Return the teacher's scores [N, V], or its answers; None for a dummy batch."""
        # Ranks that share the teacher's experts must call it equally often.
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
            missing = any(world.all_gather_object(missing, "the look at a teacher's answers"))
        if not missing:
            return None if call.dummy else _put(found, call)  # type: ignore[arg-type]
        if self.teacher is None:
            sample = texts[found.index(None)][0]
            raise ValueError(
                f"--distill-logits is {self.options.distill_logits}, which has no answers to sample "
                f"{sample}; give --distill-teacher, too, to write them."
            )
        top_k, scored = self.options.distill_top_k, call.scores_NV.shape[1]
        if top_k > scored:  # a record has K entries
            raise ValueError(
                f"--distill-top-k is {top_k} of {scored} words or classes; give no more than these."
            )
        answers = self._asked(call)
        if not call.dummy:
            of_each = _split(answers, call.counts_N, [tokens for *_, tokens in texts])
            for (sample, text, _), before, own in zip(texts, found, of_each, strict=True):
                if before is None:
                    store.write(sample, text, own)
        return answers

    def _asked(self, call: _Call) -> Any:
        """Return the teacher's scores [N, V], or its --distill-top-k answers."""
        assert self.teacher is not None
        scores_NV = self.teacher.scores(call.words, call.named, call.scores_NV.device, call.dummy)
        if scores_NV.shape != call.scores_NV.shape:
            raise ValueError(
                f"--distill-teacher gives {tuple(scores_NV.shape)} scores where the student gives "
                f"{tuple(call.scores_NV.shape)}; give a teacher of the same task and words."
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


# With the wrapped class's name: fairseq resumes only with a criterion of the same name, which is used again
# after --distill-until.
_WITH_MIXIN = {
    name: type(
        CRITERION_REGISTRY[name].__name__,
        (DistillationMixin, CRITERION_REGISTRY[name]),
        {"__module__": __name__},
    )
    for name in WRAPPED
}
DistillationOptions = made("DistillationOptions", options_in(DistillationConfig))
# The flags of every criterion that may be wrapped, MoE variants first.
_Options = dataclasses.make_dataclass(
    "MoEDistillationConfig",
    [],
    bases=(DistillationOptions, *(CRITERION_DATACLASS_REGISTRY[n] for n in WRAPPED if n[:4] == "moe_")),
    namespace={"__module__": __name__},
)


@register_criterion("moe_distillation", dataclass=_Options)
class MoEDistillationCriterion(FairseqCriterion):
    """Builds the class of --distill-criterion with `DistillationMixin` before it."""

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Build the criterion that --distill-criterion names."""
        refuse_bad_values(read(DistillationConfig, cfg))
        name = plain(cfg.distill_criterion)
        if name not in _WITH_MIXIN:
            raise ValueError(f"--distill-criterion is {name}; choose one of {', '.join(_WITH_MIXIN)}.")
        if "sentence" in name and cfg.regression_target:
            raise ValueError(
                "--regression-target is set, so the model returns numbers, not probabilities; drop it or "
                "--criterion moe_distillation."
            )
        if name.startswith("moe_") and not getattr(task, "_has_experts", False):
            raise ValueError(
                f"--distill-criterion is {name}, and the student has no experts; give "
                f"{name.removeprefix('moe_')}."
            )
        return _WITH_MIXIN[name].build_criterion(cfg, task)  # type: ignore[attr-defined]
