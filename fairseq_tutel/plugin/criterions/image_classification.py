"""The criterion image_classification: cross entropy and accuracy, also for images mixed by mixup.

Shape suffixes are B (images) and C (classes).
"""

import math
from dataclasses import dataclass, field
from typing import Any

from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor


@dataclass
class ImageClassificationCriterionConfig(FairseqDataclass):
    """Options of the criterion image_classification."""

    label_smoothing: float = field(
        default=0.0, metadata={"help": "target probability that is spread evenly over the other classes"}
    )


@register_criterion("image_classification", dataclass=ImageClassificationCriterionConfig)
class ImageClassificationCriterion(FairseqCriterion):
    """Criterion that sums the cross entropy over the images of a batch."""

    takes_mixed = True  # The task allows mixup only with a criterion that has this attribute.

    def __init__(self, task: Any, label_smoothing: float) -> None:
        super().__init__(task)
        self.label_smoothing = label_smoothing

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the loss, the number of images and the logging output.

        A mixed image has two labels; its loss is the weighted mean of the losses for the two labels.
        """
        net_output = model(**sample["net_input"])
        logprobs_BC, target_B = model.get_normalized_probs(net_output, log_probs=True), sample["target"]
        loss_B, nll_B = self._losses(logprobs_BC, target_B)
        if "mixed" in sample:
            share_B = sample["mixed"]["share"].to(loss_B.dtype)
            others = self._losses(logprobs_BC, sample["mixed"]["target"])
            loss_B, nll_B = (
                share_B * own_B + (1 - share_B) * other_B
                for own_B, other_B in zip((loss_B, nll_B), others, strict=True)
            )
        loss = loss_B.sum() if reduce else loss_B
        images, classes = logprobs_BC.shape
        hits_B5 = logprobs_BC.topk(min(5, classes), dim=1).indices == target_B[:, None]
        log = {
            "loss": loss.detach(),
            "nll_loss": nll_B.detach().sum(),
            "correct": hits_B5[:, 0].sum(),
            "top5_correct": hits_B5.sum(),
            **dict.fromkeys(("ntokens", "nsentences", "sample_size"), images),
        }
        return loss, images, log

    def _losses(self, logprobs_BC: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the label-smoothed loss and the negative log-likelihood of each image, [B] each."""
        return label_smoothed_nll_loss(logprobs_BC, target_B, self.label_smoothing, reduce=False)

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log loss and nll_loss in bits, and accuracies in percent of all images."""
        total: dict[str, Any] = {
            key: sum(log.get(key, 0) for log in logging_outputs)
            for key in ("loss", "nll_loss", "correct", "top5_correct", "nsentences")
        }
        images = total["nsentences"]
        for key in ("loss", "nll_loss"):
            metrics.log_scalar(key, total[key] / max(images, 1) / math.log(2), images, round=3)
        for key, correct in (("accuracy", "correct"), ("top5_accuracy", "top5_correct")):
            metrics.log_scalar(key, 100 * total[correct] / max(images, 1), images, round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True, because fairseq may sum logging outputs over ranks before `reduce_metrics`."""
        return True
