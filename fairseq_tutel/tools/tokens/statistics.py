"""Computes which tokens are assigned to each expert of a layer, for the tool `tokens`.

Shape suffixes are N (tokens in all samples), V (distinct tokens), E (experts), L (languages) and K (top_k).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fairseq_tutel.tools.tokens.observe import Sample

TYPICAL = 12
# Tokens that occur less often than LEAST_OFTEN are not listed as typical tokens.
LEAST_OFTEN = 3


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one MoE layer: the tokens that are assigned to each expert.

    Attributes:
        load_E: each expert's fraction of all assignments.
        typical: for each expert, pairs (token, fraction of the token's assignments), most typical first.
        languages: the languages of the samples, or [] if there is only one.
        parts_LE: for each language, each expert's fraction of the language's assignments.
    """

    load_E: np.ndarray
    typical: list[list[tuple[str, float]]]
    languages: list[str]
    parts_LE: np.ndarray


def statistics(samples: Sequence[Sample], layer: str, num_experts: int) -> LayerStatistics:
    """Return the statistics of one MoE layer over all samples whose tokens the layer routed."""
    seen = [sample for sample in samples if layer in sample.experts]
    # If experts choose tokens, the number K of experts per token differs between batches.
    most = max(sample.experts[layer].shape[1] for sample in seen)
    experts_NK = np.concatenate([_padded(sample.experts[layer], most) for sample in seen])
    lengths = [len(sample.experts[layer]) for sample in seen]
    # In the statistics, all patches of an image count as the image's class.
    texts = [
        t
        for s, n in zip(seen, lengths, strict=True)
        for t in (s.tokens * n if s.side == "image" else s.tokens)
    ]
    names, token_N = np.unique(texts, return_inverse=True)
    counts_VE = _counts(token_N, experts_NK, len(names), num_experts)
    load_E = counts_VE.sum(0) / max(1, counts_VE.sum())
    languages = sorted({sample.language for sample in seen})
    language_N = np.repeat([languages.index(sample.language) for sample in seen], lengths)
    counts_LE = _counts(language_N, experts_NK, len(languages), num_experts)
    parts_LE = counts_LE / np.maximum(1, counts_LE.sum(1, keepdims=True))
    shown = languages if len(languages) > 1 else []
    return LayerStatistics(load_E, _typical(names, counts_VE, load_E), shown, parts_LE)


def _padded(experts_TK: np.ndarray, width: int) -> np.ndarray:
    """Return expert IDs [T, width], where the added columns are -1."""
    more = width - experts_TK.shape[1]
    return np.pad(experts_TK, ((0, 0), (0, more)), constant_values=-1)


def _counts(row_N: np.ndarray, experts_NK: np.ndarray, rows: int, num_experts: int) -> np.ndarray:
    """Count the assignments of each row (a token or a group of tokens) to each expert, as [rows, E]."""
    row_NK = np.broadcast_to(row_N[:, None], experts_NK.shape)
    used = experts_NK >= 0
    index = row_NK[used] * num_experts + experts_NK[used]
    return np.bincount(index, minlength=rows * num_experts).reshape(rows, num_experts)


def _typical(names: np.ndarray, counts_VE: np.ndarray, load_E: np.ndarray) -> list[list[tuple[str, float]]]:
    """Return each expert's most typical tokens, with the expert's fraction of the token's assignments."""
    total_V = counts_VE.sum(1)
    part_VE = counts_VE / np.maximum(1, total_V)[:, None]
    # score = count * log(expert's fraction of token's assignments / expert's fraction of all assignments)
    with np.errstate(divide="ignore", invalid="ignore"):
        score_VE = np.nan_to_num(counts_VE * np.log(part_VE / load_E), nan=0.0, neginf=0.0)
    score_VE[total_V < LEAST_OFTEN] = 0
    return [
        [
            (str(names[v]), float(part_VE[v, e]))
            for v in np.argsort(-score_VE[:, e])[:TYPICAL]
            if score_VE[v, e] > 0
        ]
        for e in range(counts_VE.shape[1])
    ]
