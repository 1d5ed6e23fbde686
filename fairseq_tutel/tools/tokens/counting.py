"""Counts how often, and with which probability, gates choose each expert, per language pair.

T tokens, E experts.
"""

import torch

from fairseq_tutel.inference.expert_statistics import LayerStatistics, Statistics
from fairseq_tutel.moe.routing import Routing
from fairseq_tutel.plugin.feed_forward import MoEFeedForward


class ExpertCounts:
    """Sums over all routings of a run, from which `statistics` computes the file's numbers."""

    def __init__(self) -> None:
        # By pair and layer: tokens by first choice, their summed probabilities, assignments; [3, E] fp64.
        self._sums: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, pair: str, layer: MoEFeedForward, routing: Routing) -> None:
        """Count a routing of a layer in a batch of one language pair."""
        probs_TE = routing.probs_TE.double()
        num_experts = probs_TE.shape[1]
        # If experts choose tokens, the columns of expert_ids_TK are not sorted by score.
        by_experts = layer.config.choice == "experts"
        first_T = probs_TE.argmax(dim=1) if by_experts else routing.expert_ids_TK[:, 0]
        if routing.real_T is not None:
            first_T, probs_TE = first_T[routing.real_T], probs_TE[routing.real_T]
        prob_T = probs_TE.gather(1, first_T.unsqueeze(1)).squeeze(1)
        sums_3E = torch.stack([
            first_T.bincount(minlength=num_experts).double(),
            first_T.bincount(prob_T, minlength=num_experts),
            routing.assigned_KE.sum(dim=0).double(),
        ]).cpu()  # fmt: skip
        layers = self._sums.setdefault(pair, {})
        layers[layer.label] = layers.get(layer.label, 0) + sums_3E

    def statistics(self) -> Statistics:
        """Return the statistics of every pair and layer that routed a token.

        Raises:
            ValueError: a gate gave probabilities that are not finite, for example because weights are NaN.
        """
        sums = [sums_3E for layers in self._sums.values() for sums_3E in layers.values()]
        if not all(sums_3E.isfinite().all() for sums_3E in sums):
            raise ValueError("a gate gives probabilities that are not finite; give another MODEL.")
        return {
            pair: {label: _statistics(sums_3E) for label, sums_3E in layers.items() if sums_3E[2].any()}
            for pair, layers in self._sums.items()
        }


def _statistics(sums_3E: torch.Tensor) -> LayerStatistics:
    first_E, prob_E, assigned_E = sums_3E
    return LayerStatistics(
        tokens=int(first_E.sum()),
        activity=(first_E / first_E.sum()).tolist(),
        confidence=(prob_E / first_E.clamp_min(1)).tolist(),
        load=(assigned_E / assigned_E.mean()).tolist(),
    )
