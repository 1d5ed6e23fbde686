"""The experts that `convert prune --share` keeps, compared with a plain search."""

import itertools

import pytest

from fairseq_tutel.checkpoint.saved import Layer
from fairseq_tutel.convert.pruning import kept_by_share

FLAT, STEEP, ODD = (Layer(0, i, "encoder", f"encoder.layers.{i}", has_experts=True) for i in range(3))
SCORES = {
    FLAT: [1.0, 1.1, 0.9, 1.05, 0.95, 1.0],
    STEEP: [0.02, 5.0, 0.3, 0.01, 0.6, 0.07],
    ODD: [2.0, 0.0, 1.0],
}


@pytest.mark.parametrize(
    "share, expected", [(0.5, (3, 3, 2)), (0.01, (2, 2, 1)), (0.75, (5, 5, 2)), (1, (6, 6, 3))]
)
def test_each_layer_keeps_the_experts_with_the_highest_scores(share, expected):
    kept = kept_by_share(SCORES, share, {FLAT: 2, STEEP: 2, ODD: 1})
    for (layer, ids), count in zip(kept.items(), expected, strict=True):
        scores = SCORES[layer]
        assert len(ids) == count and ids == sorted(set(ids))
        assert min(scores[i] for i in ids) >= max(
            [s for i, s in enumerate(scores) if i not in ids], default=0
        )


def test_equal_scores_prefer_lower_ids():
    assert kept_by_share({ODD: [1.0, 1.0, 1.0, 1.0]}, 0.5, {ODD: 1}) == {ODD: [0, 1]}


@pytest.mark.parametrize("least", (1, 2))
@pytest.mark.parametrize("count", range(5, 16))
def test_globally_each_layer_covers_the_same_fraction_of_its_scores(count, least):
    """The reference raises the fraction t in small steps, until enough experts are kept."""
    found = kept_by_share(SCORES, count / 15, dict.fromkeys(SCORES, least), globally=True)
    count = max(count, 3 * least)
    for step in range(10001):
        reference = {}
        for layer, scores in SCORES.items():
            order = sorted(range(len(scores)), key=lambda i: -scores[i])
            sums = itertools.accumulate(scores[i] / sum(scores) for i in order)
            kept = [i for i, covered in zip(order, sums, strict=True) if covered <= step / 10000 + 1e-12]
            reference[layer] = {*order[:least], *kept}
        if sum(map(len, reference.values())) >= count:
            break
    assert sum(map(len, found.values())) == count
    # Several experts can be added in one step; then only some of them are kept.
    assert all(set(found[layer]) <= reference[layer] for layer in SCORES)
    if sum(map(len, reference.values())) == count:
        assert {layer: set(ids) for layer, ids in found.items()} == reference


def test_globally_a_flat_layer_keeps_more_experts_than_a_steep_one():
    kept = kept_by_share(SCORES, 8 / 15, dict.fromkeys(SCORES, 1), globally=True)
    assert len(kept[FLAT]) > len(kept[STEEP])
