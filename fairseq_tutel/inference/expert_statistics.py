"""Reads and writes statistics files: how often a model's gates choose each expert, per language pair.

`fairseq-tutel tokens --output-statistics` writes a statistics file, and `convert prune --statistics` reads
it. In a statistics file, E is the number of experts of a layer.

    {"expert_statistics": 1, "pairs": {"de-en": {"decoder_1": {
        "tokens": 9000, "activity": [E numbers], "confidence": [E numbers], "load": [E numbers]}}}}
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fairseq_tutel.files import json_of, shown

MARK, VERSION = "expert_statistics", 1
# The key in a statistics file for data without a language pair.
ALL = "all"


@dataclass(frozen=True)
class LayerStatistics:
    """How often the gate of one layer chose each of E experts, and with which probability.

    Attributes:
        tokens: the number of tokens that the layer routed, without padding.
        activity: for each expert, the fraction of tokens whose first choice is the expert.
        confidence: for each expert, its mean gate probability over these tokens, or 0 without such tokens.
        load: for each expert, its number of assignments, divided by the mean over the layer's experts.
    """

    tokens: int
    activity: Sequence[float]
    confidence: Sequence[float]
    load: Sequence[float]

    @property
    def importance(self) -> list[float]:
        """An expert's importance, activity * exp(confidence), divided by the mean over the layer's experts.

        This measure of importance is from Koishekenov et al. 2023, Memory-efficient NLLB-200.
        """
        found = [a * math.exp(c) for a, c in zip(self.activity, self.confidence, strict=True)]
        mean = sum(found) / len(found)
        return [each / mean for each in found]


# Maps a language pair, such as de-en, and then a layer's short name, such as decoder_1, to statistics.
Statistics = Mapping[str, Mapping[str, LayerStatistics]]


def text_of(statistics: Statistics) -> str:
    """Return the JSON text of a statistics file."""
    return json.dumps({MARK: VERSION, "pairs": statistics}, indent=1, default=asdict) + "\n"


def read_statistics(path: Path, flag: str) -> Statistics:
    """Read the statistics file that the option `flag` names; raise ValueError if it is malformed."""
    try:
        content = json_of(path)
        if content[MARK] != VERSION:
            raise ValueError(f"{MARK} is {shown(content[MARK])}, not {VERSION}")
        found = {
            str(pair): {str(label): _layer(values) for label, values in layers.items()}
            for pair, layers in content["pairs"].items()
        }
        if not found or not all(found.values()):
            raise ValueError("it has no layers")
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{flag} names {path}, which has no statistics of experts ({type(error).__name__}: {error}); "
            "give a file that `tokens --output-statistics` wrote."
        ) from error
    return found


def _layer(values: Mapping[str, Any]) -> LayerStatistics:
    layer = LayerStatistics(**{each.name: values[each.name] for each in fields(LayerStatistics)})
    lists = layer.activity, layer.confidence, layer.load
    numbers = [layer.tokens, *layer.activity, *layer.confidence, *layer.load]
    are_numbers = all(type(n) in (int, float) and 0 <= n < math.inf for n in numbers)
    if not are_numbers or len({len(each) for each in lists}) > 1:
        raise ValueError("the lists of a layer have different lengths, or entries that are not numbers")
    if 0 in (layer.tokens, sum(layer.activity), sum(layer.load)):
        raise ValueError("a layer has no assignments")
    return layer


def pooled(
    statistics: Statistics, pairs: Sequence[str], path: Path, flag: str
) -> dict[str, LayerStatistics]:
    """Return each layer's statistics over the tokens of the given language pairs; () means all pairs.

    In error messages, `path` is the statistics file, and `flag` the option that names the language pairs.

    Raises:
        ValueError: the statistics file lacks a language pair.
    """
    for pair in pairs:
        if pair not in statistics:
            raise ValueError(
                f"{flag} has {shown(pair)}, but {path} has no statistics of this pair; choose from "
                f"{', '.join(map(shown, statistics))}."
            )
    parts: dict[str, list[LayerStatistics]] = {}
    for pair in dict.fromkeys(pairs or statistics):
        for label, layer in statistics[pair].items():
            parts.setdefault(label, []).append(layer)
    return {label: _mean(layers) for label, layers in parts.items()}


def _mean(layers: Sequence[LayerStatistics]) -> LayerStatistics:
    """Return the statistics of one layer over the tokens of several language pairs."""
    tokens, experts = sum(layer.tokens for layer in layers), range(len(layers[0].load))
    first_E = [sum(layer.tokens * layer.activity[e] for layer in layers) for e in experts]
    confident_E = [
        sum(layer.tokens * layer.activity[e] * layer.confidence[e] for layer in layers) for e in experts
    ]
    return LayerStatistics(
        tokens=tokens,
        activity=[first / tokens for first in first_E],
        confidence=[c / first if first else 0.0 for c, first in zip(confident_E, first_E, strict=True)],
        load=[sum(layer.tokens * layer.load[e] for layer in layers) / tokens for e in experts],
    )


def of_layer(
    statistics: Mapping[str, LayerStatistics], label: str, num_experts: int, path: Path, flag: str
) -> LayerStatistics:
    """Return one layer's statistics; raise ValueError if there are none or if `num_experts` differs."""
    found = statistics.get(label)
    if found is None or len(found.load) != num_experts:
        has = "no statistics" if found is None else f"statistics of {len(found.load)} experts"
        raise ValueError(
            f"{flag} names {path}, which has {has} for {label}, but the layer has {num_experts} experts; "
            "give the statistics of this model."
        )
    return found
