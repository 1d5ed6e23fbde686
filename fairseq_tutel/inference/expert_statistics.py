"""Statistics of how a model's gates choose experts, per language pair, and the JSON file that holds them.

`fairseq-tutel tokens --output-statistics` writes the file. `convert prune --statistics` and
--moe-expert-prefetch read it. E is the number of experts of a layer.

    {"expert_statistics": 1, "pairs": {"de-en": {"decoder_1": {
        "tokens": 9000, "activity": [E numbers], "confidence": [E numbers], "load": [E numbers]}}}}
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fairseq_tutel.files import json_of, shown

MARK, VERSION = "expert_statistics", 1
# The name in the file of data without a language pair.
ALL = "all"
# Maximum of the numbers that are not fractions; larger ones would overflow in sums.
_LARGEST = 1e12
# Minimum of the sum of a layer's activities, which is 1, and of its loads; smaller sums would underflow.
_LEAST = 1e-6
# Maximum number of language pairs in an error message.
_MOST_NAMES = 20


@dataclass(frozen=True)
class LayerStatistics:
    """How often, and with which probability, the gate of one layer chose each of E experts.

    Attributes:
        tokens: number of tokens that the layer routed, without padding.
        activity: for each expert, the fraction of tokens whose first choice it is.
        confidence: the mean gate probability of the expert over these tokens; 0 if there are none.
        load: the expert's assignments of all choices, over the mean of the layer; the mean load is 1.
    """

    tokens: int
    activity: Sequence[float]
    confidence: Sequence[float]
    load: Sequence[float]

    @property
    def importance(self) -> list[float]:
        """Each expert's activity * exp(confidence), over the mean of the layer; the mean is 1.

        Source: Koishekenov et al. 2023, Memory-efficient NLLB-200.
        """
        found = [a * math.exp(c) for a, c in zip(self.activity, self.confidence, strict=True)]
        mean = sum(found) / len(found)
        return [each / mean for each in found]


# By language pair, such as de-en, and by the short name of a layer, such as decoder_1.
Statistics = Mapping[str, Mapping[str, LayerStatistics]]


def text_of(statistics: Statistics) -> str:
    """Return the JSON text of a file of statistics."""
    pairs = {
        pair: {label: _rounded(asdict(layer)) for label, layer in layers.items()}
        for pair, layers in statistics.items()
    }
    return json.dumps({MARK: VERSION, "pairs": pairs}, indent=1) + "\n"


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: [float(f"{each:.8g}") for each in value] if isinstance(value, Sequence) else value
        for key, value in values.items()
    }


def read_statistics(path: Path, flag: str) -> Statistics:
    """Read a file of statistics, the value of the option `flag`; raise ValueError for any other file."""
    advice = "give a file that `tokens --output-statistics` wrote"
    try:
        content = json_of(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{flag} names {path}, which cannot be read ({reason}); {advice}.") from error
    if not isinstance(content, dict) or content.get(MARK) != VERSION:
        raise ValueError(f"{flag} names {path}, which has no statistics of experts; {advice}.")
    try:
        found = {
            str(pair): {str(label): _layer(values) for label, values in layers.items()}
            for pair, layers in content["pairs"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{flag} names {path}, whose statistics are malformed ({type(error).__name__}: {error}); "
            f"{advice}."
        ) from error
    if not found or not all(found.values()):
        raise ValueError(f"{flag} names {path}, whose statistics have no layers; {advice}.")
    return found


def _layer(values: Mapping[str, Any]) -> LayerStatistics:
    tokens, *lists = (values[each.name] for each in fields(LayerStatistics))
    if type(tokens) is not int or not 1 <= tokens <= _LARGEST:
        raise ValueError(f"tokens is {shown(tokens)}")
    if len({len(each) for each in lists}) > 1:
        raise ValueError("the lists of a layer have different lengths")
    for numbers, largest in zip(lists, (1, 1, _LARGEST), strict=True):
        for each in numbers:
            if type(each) not in (int, float) or not 0 <= each <= largest:
                raise ValueError(f"{shown(each)} is not a number from 0 to {largest:g}")
    found = LayerStatistics(tokens, *lists)
    if min(sum(found.activity), sum(found.load)) < _LEAST:
        raise ValueError("a layer has no assignments")
    return found


def pooled(
    statistics: Statistics, pairs: Sequence[str], path: Path, flag: str
) -> dict[str, LayerStatistics]:
    """Return the statistics of each layer over the tokens of some language pairs; () means all pairs.

    `path` is the file, and `flag` the option that names the pairs, for errors.

    Raises:
        ValueError: the file lacks a pair, or the number of experts of a layer differs between pairs.
    """
    for pair in pairs:
        if pair not in statistics:
            raise ValueError(
                f"{flag} has {shown(pair)}, but {path} has no statistics of this pair; choose from "
                f"{_some(statistics)}."
            )
    parts: dict[str, list[LayerStatistics]] = {}
    for pair in dict.fromkeys(pairs or statistics):
        for label, layer in statistics[pair].items():
            parts.setdefault(label, []).append(layer)
    for label, layers in parts.items():
        if len({len(layer.load) for layer in layers}) > 1:
            raise ValueError(
                f"{path} has different numbers of experts in {label} for different language pairs; give "
                "statistics of one model."
            )
    return {label: _mean(layers) for label, layers in parts.items()}


def _some(pairs: Iterable[str]) -> str:
    """Return the first language pairs of a file for an error message."""
    names = [shown(pair) for pair in pairs]
    more = ", …" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _mean(layers: Sequence[LayerStatistics]) -> LayerStatistics:
    """Return the statistics of one layer over the tokens of several pairs."""
    tokens = sum(layer.tokens for layer in layers)
    firsts = [[layer.tokens * share for share in layer.activity] for layer in layers]
    confident = [
        [first * each for first, each in zip(of_layer, layer.confidence, strict=True)]
        for of_layer, layer in zip(firsts, layers, strict=True)
    ]
    loads = [[layer.tokens * each for each in layer.load] for layer in layers]
    first_E = _sums(firsts)
    return LayerStatistics(
        tokens=tokens,
        activity=[first / tokens for first in first_E],
        confidence=[
            c / first if first else 0.0 for c, first in zip(_sums(confident), first_E, strict=True)
        ],
        load=[load / tokens for load in _sums(loads)],
    )


def _sums(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def of_layer(
    statistics: Mapping[str, LayerStatistics], label: str, num_experts: int, path: Path, flag: str
) -> LayerStatistics:
    """Return the statistics of one layer of a model; raise ValueError if its experts have none."""
    found = statistics.get(label)
    if found is None or len(found.load) != num_experts:
        has = "no statistics" if found is None else f"statistics of {len(found.load)} experts"
        raise ValueError(
            f"{flag} names {path}, which has {has} for {label}, but the layer has {num_experts} experts; "
            "give the statistics of this model."
        )
    return found
