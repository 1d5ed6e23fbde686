"""Chooses the experts that `convert prune` keeps, from a score of every expert. E is a layer's experts."""

import math
from collections.abc import Mapping, Sequence

from fairseq_tutel.checkpoint.saved import Layer

Scores = Mapping[Layer, Sequence[float]]


def kept_by_share(
    scores: Scores, share: float, least: Mapping[Layer, int], globally: bool = False
) -> dict[Layer, list[int]]:
    """Return the sorted IDs of the experts to keep in each layer: a share of all experts.

    By default, each layer keeps the same share: its experts with the highest scores. With `globally`, the
    share is that of the whole model. Every layer then keeps the experts with the highest scores that
    together have a fraction t of the layer's total score; t is the same in all layers. Equal scores prefer
    lower IDs.

    Source of `globally`: the global threshold of Koishekenov et al. 2023, Memory-efficient NLLB-200.

    Args:
        scores: scores of at least 0 of the E experts of each layer, not all of them 0.
        share: the share to keep, above 0 and at most 1; the number is rounded.
        least: the minimum number of experts of each layer, at most E.
        globally: whether layers may keep different shares.
    """
    ranked = {layer: _ranked(of_layer) for layer, of_layer in scores.items()}
    if not globally:
        return {
            layer: sorted(ids[: max(least[layer], _rounded(share * len(ids)))])
            for layer, ids in ranked.items()
        }
    # Order in which experts are kept as t grows. The first ones of each layer are always kept.
    order = sorted(
        (place >= least[layer], fraction, place, layer)
        for layer, ids in ranked.items()
        for place, fraction in enumerate(_fractions([scores[layer][i] for i in ids]))
    )
    count = max(_rounded(share * len(order)), sum(least.values()))
    kept: dict[Layer, list[int]] = {layer: [] for layer in ranked}
    for _, _, place, layer in order[:count]:
        kept[layer].append(ranked[layer][place])
    return {layer: sorted(ids) for layer, ids in kept.items()}


def _rounded(number: float) -> int:
    return math.floor(number + 0.5)


def _ranked(scores: Sequence[float]) -> list[int]:
    """Return the expert IDs, the highest score first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


def _fractions(scores: Sequence[float]) -> list[float]:
    """Return, for each score, the sum of the scores up to and including it over the total."""
    total, found, running = math.fsum(scores), [], 0.0
    for score in scores:
        running += score
        found.append(running / total)
    return found
