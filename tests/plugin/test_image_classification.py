"""image_classification: the loss equals torch's cross entropy, and accuracies equal a loop's."""

import math

import pytest
import torch
import torch.nn.functional as F
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask

from fairseq_tutel.plugin.criterions.image_classification import ImageClassificationCriterion


class Logits(BaseFairseqModel):
    """A model that returns the input images as logits."""

    def forward(self, images):
        return images


def batch_of(classes, mixed, seed=1, images=6):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, classes, generator=draw).double().requires_grad_()
    target, other = torch.randint(classes, (2, images), generator=draw)
    sample = {"net_input": {"images": logits}, "target": target}
    share = torch.rand(images, generator=draw)
    return sample | ({"mixed": {"target": other, "share": share}} if mixed else {})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_loss_is_the_cross_entropy_with_smoothed_and_mixed_targets(smoothing, mixed):
    sample = batch_of(7, mixed)
    logits, share = sample["net_input"]["images"], torch.ones(6)
    aims = F.one_hot(sample["target"], 7).float()
    if mixed:
        share = sample["mixed"]["share"][:, None]
        aims = share * aims + (1 - share) * F.one_hot(sample["mixed"]["target"], 7)
    criterion = ImageClassificationCriterion(FairseqTask(None), smoothing)
    loss, sample_size, log = criterion(Logits(), sample)
    nll = F.cross_entropy(logits.float(), aims, reduction="sum")
    # fairseq's smoothing adds probability only to the other classes.
    smoothed = aims * (1 - smoothing) + (1 - aims) * smoothing / 6
    expected = F.cross_entropy(logits.float(), smoothed, reduction="sum")
    assert sample_size == log["nsentences"] == log["ntokens"] == 6
    torch.testing.assert_close([loss, log["nll_loss"]], [expected, nll.detach()])
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (loss, expected)))


@pytest.mark.parametrize("classes", [3, 9])
def test_accuracies_are_percentages_over_all_images(classes):
    batches = [batch_of(classes, False, seed, images) for seed, images in ((1, 6), (2, 1), (3, 30))]
    criterion = ImageClassificationCriterion(FairseqTask(None), 0.0)
    with metrics.aggregate() as found:
        criterion.reduce_metrics([criterion(Logits(), batch)[2] for batch in batches])
    ranks = [
        int((row > row[target]).sum())
        for batch in batches
        for row, target in zip(batch["net_input"]["images"], batch["target"], strict=True)
    ]
    nll = sum(
        F.cross_entropy(b["net_input"]["images"], b["target"], reduction="sum").item() for b in batches
    )
    expected = {
        "accuracy": 100 * sum(rank < 1 for rank in ranks) / 37,
        "top5_accuracy": 100 * sum(rank < 5 for rank in ranks) / 37,
        "nll_loss": nll / 37 / math.log(2),
        "loss": nll / 37 / math.log(2),
    }
    values = {name: found[name].avg for name in expected}
    assert {name: float(value) for name, value in values.items()} == pytest.approx(expected)
