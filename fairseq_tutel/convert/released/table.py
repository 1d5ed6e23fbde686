"""Defines `Family`, the tensor names and options of a kind of model in Hugging Face's format and fairseq.

A family is read in both directions: from config.json and Hugging Face's tensors to fairseq's options and
tensors, and back. In the code, "theirs" means Hugging Face's names, and "ours" means fairseq's.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairseq_tutel.files import shown

# A config.json with larger numbers is refused, because the converter lists all tensor names.
MOST, MOST_LAYERS = 2**31 - 1, 1000
BRACES = re.compile(r"\{([^{}]*)\}")
# For each activation of transformers, the fairseq activation with the same values.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate", "tanh": "tanh"}
OPPOSITE = {True: False, False: True}


class Row(NamedTuple):
    """A tensor's names in transformers and in fairseq; a tied tensor has several equivalent names."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """A pattern of tensor names in transformers and in fairseq, which `rows` expands.

    - {a,b} stands for a or b, as in a shell. The patterns for transformers and for fairseq must
      expand to equally many names.
    - In a name, * stands for the index of a layer. The option or function `layers` gives the number of
      layers.
    - Spaces separate the names of a tied tensor. The first name of a tied tensor is preferred.
    """

    theirs: str
    ours: str
    layers: str | Callable[[Mapping[str, Any]], int] = ""
    # A model has the tensors only if its fairseq options have these values.
    when: Mapping[str, Any] = field(default_factory=dict)
    # A function from fairseq options to the indices of layers that have the tensors; by default all layers.
    only: Callable[[Mapping[str, Any]], Iterable[int]] | None = None

    def rows(self, options: Mapping[str, Any]) -> Iterator[Row]:
        """Yield the names of the tensors that a model with the given fairseq options has."""
        if any(options.get(key) != value for key, value in self.when.items()):
            return
        pairs = list(zip(expanded(self.theirs), expanded(self.ours), strict=True))
        count = 1
        if self.layers:
            count = self.layers(options) if callable(self.layers) else options[self.layers]
        for i in self.only(options) if self.only else range(count):
            for theirs, ours in pairs:
                yield Row(*(tuple(text.replace("*", str(i)).split()) for text in (theirs, ours)))


def expanded(pattern: str) -> list[str]:
    """Expand each {a,b} in a pattern, and return all names; the last braces vary fastest."""
    parts = BRACES.split(pattern)  # Parts with an odd index were in braces.
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


@dataclass(frozen=True)
class Option:
    """An option that both transformers and fairseq have."""

    theirs: str
    # The equivalent fairseq options, separated by spaces. The form a|b means a or, if it is not set, b.
    ours: str
    # The default of transformers, for a config.json without the option's key.
    default: Any
    # A dict from transformers' values to fairseq's values; empty if both systems use the same values.
    values: Mapping[Any, Any] = field(default_factory=dict)
    # The offset is the number in config.json minus the number in fairseq.
    offset: int = 0

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fairseq options for a config.json.

        Raises:
            ValueError: transformers' value has no counterpart in fairseq, or is a number out of range.
        """
        value = config.get(self.theirs)
        value = self.default if value is None else value
        least, most = -MOST, MOST_LAYERS if self.ours.endswith("_layers") else MOST
        if isinstance(self.default, float):
            least, most = 0, 1 if "drop" in self.ours else MOST
        if self.values:
            found = [own for key, own in self.values.items() if key == value]
            if not found:
                raise ValueError(
                    f"config.json has {self.theirs} {shown(value)}, which fairseq's model does not have; "
                    f"the supported values are {', '.join(map(str, self.values))}."
                )
            value = found[0]
        elif not isinstance(value, int | float) or not least <= value <= most:  # NaN is refused.
            raise ValueError(
                f"config.json has {self.theirs} {shown(value)}; give a number from {least} to {most}."
            )
        keys = (word.partition("|")[0] for word in self.ours.split())
        return dict.fromkeys(keys, value - self.offset if self.offset else value)

    def keys(self, options: Mapping[str, Any]) -> list[str]:
        """Return the names of the fairseq options in `ours` that are set in `options`."""
        choices = (word.split("|") for word in self.ours.split())
        own = ([key for key in keys if options.get(key) is not None] for keys in choices)
        return [keys[0] for keys in own if keys]

    def write(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the option's config.json entry for the given fairseq options.

        Raises:
            ValueError: the fairseq options in `ours` differ, or transformers lacks their value.
        """
        keys = self.keys(options)
        found = {key: options[key] for key in keys}
        if len({repr(value) for value in found.values()}) > 1:
            raise ValueError(
                f"INPUT has {', '.join(f'{key} {value}' for key, value in found.items())}, but "
                "transformers has one value for these options; this model cannot be converted."
            )
        if not keys and not isinstance(self.default, bool | float):
            raise ValueError(
                f"INPUT lacks the option {self.ours.split()[0]}; give a checkpoint of fairseq-train."
            )
        # If an older fairseq checkpoint lacks a switch or probability, the missing value is False or 0.
        value = found[keys[0]] if keys else type(self.default)()
        if self.values:
            theirs = [key for key, own in self.values.items() if own == value]
            if not theirs:
                raise ValueError(
                    f"INPUT has {keys[0]} {value}, which transformers does not have; the supported "
                    f"values are {', '.join(map(str, self.values.values()))}."
                )
            value = theirs[0]
        return {self.theirs: value + self.offset if self.offset else value}


class Setup(NamedTuple):
    """The arguments of a family's function `setup`, which returns task options."""

    options: dict[str, Any]  # The fairseq options of the model.
    config: Mapping[str, Any]  # The content of config.json.
    tokenizer: str  # The class of transformers' tokenizer; empty if unknown.
    languages: list[str]  # The codes of the languages in the dictionary.
    normalizes: bool = False  # True if audio is normalized to mean 0 and variance 1.


@dataclass(frozen=True, kw_only=True)
class Family:
    """The tensor names and options of a kind of model in transformers and in fairseq."""

    # The value of model_type in config.json.
    name: str
    # Model classes that config.json may name; to-hf writes the first class.
    architectures: tuple[str, ...]
    # The prefix of all tensor names except the head's; files of a model without a head lack the prefix.
    prefix: str
    # The fairseq architecture, whose default options apply.
    arch: str
    task: str
    names: tuple[Names, ...]
    options: tuple[Option, ...]
    # Values of fairseq options that are the same in all models of the family.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Required values of entries in config.json; a missing entry is accepted, too.
    assumed: Mapping[str, Any] = field(default_factory=dict)
    # Additional entries that to-hf writes to config.json.
    written: Mapping[str, Any] = field(default_factory=dict)
    # A pattern of the keys of config.json that a conversion ignores.
    ignored: str = ""
    # A pattern of transformers tensors without a counterpart, such as computed position tables.
    dropped: str = ""
    # transformers tensors that must be zero, and their shapes as numbers or keys of `vocabulary_sizes`.
    zeros: Mapping[str, str] = field(default_factory=dict)
    # fairseq tensors that transformers lacks, and their shapes. from-hf skips a tensor with an empty shape.
    unused: Mapping[str, str] = field(default_factory=dict)
    # A fairseq tensor, and the transformers tensor whose only row is added to the fairseq tensor.
    summed: Mapping[str, str] = field(default_factory=dict)
    # fairseq tensors to which from-hf gives these values, such as the version of an encoder.
    constants: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # A key of config.json for a vocabulary size, and the fairseq embedding table of that size.
    vocabulary_sizes: Mapping[str, str] = field(default_factory=dict)
    # Additional command-line arguments of fairseq-train for the converted model.
    words: tuple[str, ...] = ()
    # The pattern of a language's symbol in fairseq's dictionary, such as __{}__; empty without languages.
    form: str = ""
    vocabulary: str = ""  # Tokenizer: sentencepiece, gpt2, pair (a dictionary per language), or empty.
    # A function that returns additional task options, such as the languages.
    setup: Callable[[Setup], dict[str, Any]] = lambda setup: {}
    # A function that returns additional fairseq model options from a config.json.
    read_more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    # A function that returns additional entries of config.json from fairseq's model and task options.
    write_more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda options: {}

    def rows(self, options: Mapping[str, Any]) -> list[Row]:
        """Return the names of all tensors of a model with the given fairseq options."""
        return [row for names in self.names for row in names.rows(options)]

    def stacks(self, options: Mapping[str, Any]) -> dict[str, tuple[list[str], tuple[int, ...]]]:
        """For each stacked tensor, return transformers' names of its E tensors, and one tensor's shape."""
        return {}

    def notes(self, options: Mapping[str, Any]) -> list[str]:
        """Return notes on differences between fairseq and transformers for a model with these options."""
        return []

    def read_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fairseq options for a config.json.

        Raises:
            ValueError: a value in config.json has no counterpart in fairseq.
        """
        for key, value in self.assumed.items():
            if config.get(key, value) != value:
                raise ValueError(
                    f"config.json has {key} {shown(config[key])}, which fairseq's {self.arch} does not "
                    f"have; only models with {key} {value!r} can be converted."
                )
        found = dict(self.fixed)
        for option in self.options:
            found |= option.read(config)
        return found | self.read_more(config)

    def sizes(self, weights: Mapping[str, Any]) -> dict[str, int]:
        """Return the vocabulary sizes for config.json: row counts of fairseq's embedding tables."""
        return {key: len(weights[name]) for key, name in self.vocabulary_sizes.items()}

    def differing(self, options: Mapping[str, Any]) -> list[str]:
        """Return the fairseq options that differ from `fixed`. None and "" equal False and 0."""
        pairs = ((key, options.get(key), value) for key, value in self.fixed.items())
        return [key for key, own, value in pairs if (own or value) and own != value]

    def write_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json for fairseq options.

        Raises:
            ValueError: a fairseq option has no counterpart in transformers.
        """
        for key in self.differing(options):
            raise ValueError(
                f"INPUT has {key} {options.get(key)!r}, but {self.architectures[0]} has only "
                f"{self.fixed[key]!r}; this model cannot be converted."
            )
        found: dict[str, Any] = {"architectures": [self.architectures[0]], "model_type": self.name}
        for option in self.options:
            found |= option.write(options)
        return {**found, **self.written}


def transformer_layer(side: str, theirs: str = "", has_cross_attention: bool | None = None) -> list[Names]:
    """Return name patterns of layers whose tensor names differ only by a prefix in the two systems.

    Args:
        side: encoder or decoder.
        theirs: transformers' prefix of layer names; by default model.SIDE.layers.
        has_cross_attention: true for a layer with cross attention; by default, decoders have it.
    """
    prefix, ours, count = theirs or f"model.{side}.layers", f"{side}.layers", f"{side}_layers"
    crossed = side == "decoder" if has_cross_attention is None else has_cross_attention
    parts = [
        "self_attn.{k,v,q,out}_proj.{weight,bias}",
        "{self_attn_layer_norm,fc1,fc2,final_layer_norm}.{weight,bias}",
    ]
    if crossed:
        parts += [
            "encoder_attn.{k,v,q,out}_proj.{weight,bias}",
            "encoder_attn_layer_norm.{weight,bias}",
        ]
    return [Names(f"{prefix}.*.{part}", f"{ours}.*.{part}", count) for part in parts]
