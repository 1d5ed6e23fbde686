"""Reads the IDs of the experts to keep from a JSON file, such as experts.json of naver/nllb-pruning.

A file of experts to keep has one of these forms:

- [0, 5, 130, …]: a list of global expert IDs. With E experts per layer, MoE layer n (encoder first) has the
  global IDs n * E to n * E + E - 1.
- {"eng_Latn": [0, 5, …], …} or {"eng_Latn-fra_Latn": […], …}: lists of global expert IDs per language or
  pair. The encoder keeps the experts of source languages, the decoder those of target languages.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fairseq_tutel.files import json_of, shown

FORMS = "give a JSON list of global IDs, or a file of naver/nllb-pruning with --keep-for"


def kept_experts(
    path: Path, pairs: Sequence[str], layers: Sequence[str], num_experts: int, top_k: int
) -> dict[str, list[int]]:
    """Return the sorted IDs of the experts to keep in each MoE layer.

    Args:
        path: the file, the value of --keep-experts.
        pairs: language pairs such as eng_Latn-fra_Latn, the values of --keep-for.
        layers: names of the MoE layers in model order, such as encoder.layers.3.
        num_experts: the number of experts of each layer.
        top_k: the number of experts per token; each layer must keep at least this number of experts.

    Raises:
        ValueError: the file cannot be read, or does not fit the model or the pairs.
    """

    def refusal(what: str) -> ValueError:
        return ValueError(f"--keep-experts names {path}, {what}; {FORMS}.")

    def checked(ids: Any) -> list[int]:
        if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < total for i in ids):
            raise refusal(f"which has {shown(ids)} in place of expert IDs from 0 to {total - 1}")
        return ids

    try:
        content = json_of(path)
    except (OSError, ValueError) as error:
        raise refusal(f"which cannot be read ({error})") from error
    total, border = num_experts * len(layers), num_experts * sum(name[0] == "e" for name in layers)
    kept: dict[str, set[int]] = {layer: set() for layer in layers}
    for i in _of_pairs(content, pairs, border, checked, refusal) if pairs else checked(content):
        kept[layers[i // num_experts]].add(i % num_experts)
    for layer, ids in kept.items():
        if len(ids) < top_k:
            raise refusal(f"which keeps {len(ids)} experts in {layer}, but each token uses {top_k}")
    return {layer: sorted(ids) for layer, ids in kept.items()}


def _of_pairs(
    content: Any,
    pairs: Sequence[str],
    border: int,
    checked: Callable[[Any], list[int]],
    refusal: Callable[[str], ValueError],
) -> list[int]:
    """Return the global expert IDs for language pairs; IDs below `border` are the encoder's."""
    if not isinstance(content, dict):
        raise refusal("which has no languages, so --keep-for does not apply")
    found: set[int] = set()
    for pair in pairs:
        if pair in content:
            found |= {*checked(content[pair])}
            continue
        source, _, target = pair.partition("-")
        for language, is_decoder in ((source, False), (target, True)):
            if language not in content:
                raise refusal(f"which has no list for {shown(language)}, a language of --keep-for")
            found |= {i for i in checked(content[language]) if (i >= border) == is_decoder}
    return sorted(found)
