"""Defines the criterion cmcl (confident multiple choice learning), by which ensemble members specialize.

The members that predict a sample best learn this sample. All other members learn to predict a uniform
distribution. Independent ensembles and multiple choice learning are special cases of the criterion
cmcl. A sample is an image, or a token that is not padding. Shape suffixes are M (members), N (samples) and
C (classes).
"""

import math
from typing import Any

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_tutel.option import options_in, read, refuse_bad_values
from fairseq_tutel.plugin.criterions.confident_loss import confident_loss, random_labels
from fairseq_tutel.plugin.ensemble_options import CMCLConfig
from fairseq_tutel.plugin.registration.flags import made

CMCLOptions = made("CMCLOptions", options_in(CMCLConfig))
RIGHT = "right_member"  # Prefix of the log keys that count each member's correct predictions.


@register_criterion("cmcl", dataclass=CMCLOptions)
class CMCLCriterion(FairseqCriterion):
    """Criterion that trains an ensemble by confident multiple choice learning.

    The loss is summed over members and samples. Perplexity uses the mean of the members' probabilities.
    """

    def __init__(self, task: Any, options: CMCLConfig) -> None:
        super().__init__(task)
        self.options = options

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "CMCLCriterion":
        """Build the criterion from the command-line options."""
        options = read(CMCLConfig, cfg)
        refuse_bad_values(options)
        return cls(task, options)

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the loss, the sample size and the logging output of a batch."""
        options, target_N = self.options, sample["target"].reshape(-1)
        counts_N = target_N != self.padding_idx  # For images, padding_idx is -100, so all images count.
        net_output = model(**sample["net_input"])
        logits_MNC = self._member_logits(net_output).flatten(1, -2)
        logs_XC = model.get_normalized_probs(net_output, log_probs=True)  # type: ignore[operator]
        labels_MN = random_labels(logits_MNC) if options.cmcl_stochastic else None
        loss, _ = confident_loss(
            logits_MNC, target_N, options.cmcl_overlap, options.cmcl_beta, labels_MN, counts_N
        )
        log = _answers(logs_XC.flatten(0, -2), logits_MNC, target_N, counts_N)
        log |= {"loss": loss.detach(), "nsentences": len(sample["target"])}
        log |= dict.fromkeys(("ntokens", "sample_size"), sample["ntokens"])
        return loss, sample["ntokens"], log

    def _member_logits(self, net_output: Any) -> Tensor:
        """Return the logits [M, …, C] of all members; raise an error if the model is no ensemble."""
        extra = net_output[1] if isinstance(net_output, tuple) and len(net_output) > 1 else None
        logits_MXC = extra.get("member_logits") if isinstance(extra, dict) else None
        if logits_MXC is None:
            raise ValueError(
                "--criterion cmcl trains members of an ensemble, but the model is not an ensemble; choose "
                "--arch ensemble_of, or --criterion cross_entropy."
            )
        return logits_MXC

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log metrics from all logging outputs: losses in bits, accuracies and error rates in percent."""
        found = {key for log in logging_outputs for key in log}
        total = {key: float(sum(log.get(key, 0) for log in logging_outputs)) for key in found}
        size, counted = (max(total[key], 1e-9) for key in ("sample_size", "counted"))
        bits = 1 / math.log(2)
        metrics.log_scalar("loss", total["loss"] / size * bits, size, round=3)
        metrics.log_scalar("nll_loss", total["nll_loss"] / counted * bits, counted, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        shares = {"accuracy": total["right_mean"]}
        of_members = [total[f"{RIGHT}{m}"] for m in range(sum(RIGHT in key for key in total))]
        if len(of_members) > 1:
            shares["oracle_error"] = total["counted"] - total["right_any"]
            shares["member_accuracy"] = sum(of_members) / len(of_members)
            shares |= {f"member{m}_accuracy": right for m, right in enumerate(of_members)}
        for name, share in shares.items():
            metrics.log_scalar(name, 100 * share / counted, counted, round=2)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True, because fairseq may sum logging outputs over ranks before `reduce_metrics`."""
        return True


@torch.no_grad()
def _answers(logs_NC: Tensor, logits_MNC: Tensor, target_N: Tensor, counts_N: Tensor) -> dict[str, Any]:
    right_MN = (logits_MNC.argmax(dim=2) == target_N) & counts_N
    at_target_N = logs_NC.gather(1, target_N.masked_fill(~counts_N, 0).unsqueeze(1)).squeeze(1)
    return {
        "nll_loss": -at_target_N.masked_fill(~counts_N, 0.0).sum(),
        "counted": counts_N.sum(),
        "right_mean": ((logs_NC.argmax(dim=1) == target_N) & counts_N).sum(),
        "right_any": right_MN.any(dim=0).sum(),
        **{f"{RIGHT}{m}": right for m, right in enumerate(right_MN.sum(dim=1))},
    }
