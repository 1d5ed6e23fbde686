"""Options for all MoE layers of a checkpoint, as 3,5, or for some, as decoder_1=3,5 encoder_3=0."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from fairseq_tutel.tools.convert.layers import Layer

T = TypeVar("T")


def by_layer(
    flag: str, words: Sequence[str], layers: Sequence[Layer], read: Callable[[str], T]
) -> dict[Layer, T]:
    """Return what an option's words say for each layer that they name.

    Args:
        flag: of the option, for errors.
        words: one without a layer's label, or some with one each.
        layers: that the checkpoint has.
        read: makes a value of a word; its ValueError says why it cannot, and how the word should be.

    Raises:
        ValueError: naming the flag, the word and the fix.
    """
    named = {layer.label: layer for layer in layers}
    found: dict[Layer, T] = {}
    for word in words:
        label, equals, text = word.rpartition("=")
        if not equals and len(words) > 1:
            raise ValueError(
                f"{flag} is {' '.join(words)}; give one for all layers, or LAYER=… for each."
            )
        if equals and (label not in named or named[label] in found):
            raise ValueError(
                f"{flag} has {word}, but {label} is given twice or no layer with experts; there are "
                f"{', '.join(named)}."
            )
        try:
            value = read(text)
        except ValueError as error:
            raise ValueError(f"{flag} has {word or 'an empty word'}, where {error}.") from None
        found |= {named[label]: value} if equals else dict.fromkeys(layers, value)
    return found


def ids(text: str) -> list[int]:
    """Read expert ids, separated by commas.

    Raises:
        ValueError: no whole numbers of at least 0, or one of them twice.
    """
    parts = text.split(",")
    for part in parts:
        if not re.fullmatch(r"\s*[0-9]+\s*", part):
            raise ValueError(
                f"{part!r} is no expert's id; give ids with commas between them, as 0,3"
            )
    refuse_twice([int(part) for part in parts])
    return [int(part) for part in parts]


def refuse_twice(found: Sequence[int]) -> None:
    """Refuse an id that is there twice.

    Raises:
        ValueError: naming it.
    """
    for i in found:
        if found.count(i) > 1:
            raise ValueError(f"expert {i} is there twice; name it once")


def refuse_unknown(flag: str, layer: Layer, found: Sequence[int], num_experts: int) -> None:
    """Refuse ids of experts that a layer does not have.

    Raises:
        ValueError: naming flag, layer, id and the fix.
    """
    for i in found:
        if not 0 <= i < num_experts:
            raise ValueError(
                f"{flag} names expert {i}, but {layer.label} has {num_experts}; give ids from 0 to "
                f"{num_experts - 1}."
            )
