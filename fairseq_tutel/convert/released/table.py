"""Defines `Family`, a table of the names and options of a kind of model in both systems.

A family is read in both directions: from config.json and Hugging Face's tensors to fairseq's options and
tensors, and back. "Their" means Hugging Face's, "our" means fairseq's.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairseq_tutel.files import shown

# Larger numbers in config.json are refused, because the names of all tensors are listed.
MOST, MOST_LAYERS = 2**31 - 1, 1000
BRACES = re.compile(r"\{([^{}]*)\}")
# Their activation -> our activation. Both names of a pair compute the same function.
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate", "tanh": "tanh"}
OPPOSITE = {True: False, False: True}


class Row(NamedTuple):
    """One tensor in both systems. A tensor with several names is tied: all names hold the same values."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """A pattern of tensor names in both systems; `rows` expands it.

    - {a,b} stands for a or b, as in a shell; the two names must have the same number of expansions.
    - * stands for the index of a layer. The number of layers is in our option `layers`, or the function
      `layers` returns it.
    - Spaces separate the names of a tied tensor. The first name is preferred.

    Attributes:
        when: the model has these tensors only if our options have these values.
        only: function from our options to the indices of the layers with these tensors; by default all.
    """

    theirs: str
    ours: str
    layers: str | Callable[[Mapping[str, Any]], int] = ""
    when: Mapping[str, Any] = field(default_factory=dict)
    only: Callable[[Mapping[str, Any]], Iterable[int]] | None = None

    def rows(self, options: Mapping[str, Any]) -> Iterator[Row]:
        """Yield the tensors of a model that has these fairseq options."""
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
    """Expand {a,b} in a pattern; the last braces vary fastest."""
    parts = BRACES.split(pattern)  # `split` alternates between text and the content of braces
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


@dataclass(frozen=True)
class Option:
    """An option in both systems.

    Attributes:
        theirs: a key of config.json.
        ours: one or several fairseq options, separated by spaces; all have the same value. a|b means the
            option a, or b if a is not set.
        default: the value if config.json lacks the key: the default of transformers.
        values: their value -> our value; empty if the values are equal.
        offset: their number minus our number.
    """

    theirs: str
    ours: str
    default: Any
    values: Mapping[Any, Any] = field(default_factory=dict)
    offset: int = 0

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return our options for a config.json.

        Raises:
            ValueError: transformers' value has no counterpart, or is an impossible number.
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
        elif not isinstance(value, int | float) or not least <= value <= most:  # this also refuses NaN
            raise ValueError(
                f"config.json has {self.theirs} {shown(value)}; give a number from {least} to {most}."
            )
        keys = (word.partition("|")[0] for word in self.ours.split())
        return dict.fromkeys(keys, value - self.offset if self.offset else value)

    def keys(self, options: Mapping[str, Any]) -> list[str]:
        """Return the fairseq options in `ours` that are set in these options."""
        choices = (word.split("|") for word in self.ours.split())
        own = ([key for key in keys if options.get(key) is not None] for keys in choices)
        return [keys[0] for keys in own if keys]

    def write(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry of config.json for our options.

        Raises:
            ValueError: the options in `ours` have different values, or transformers has no such value.
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
        # Older checkpoints lack switches and probabilities that have no effect.
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


def switch(theirs: str, ours: str, default: bool, opposite: bool = False) -> Option:
    """Return an option that is True or False; with `opposite`, our value is the negation of theirs."""
    return Option(theirs, ours, default, OPPOSITE if opposite else {True: True, False: False})


class Setup(NamedTuple):
    """The values that the options of a task depend on."""

    options: dict[str, Any]  # our options of the model
    config: Mapping[str, Any]  # config.json
    tokenizer: str  # class of transformers' tokenizer; empty if unknown
    languages: list[str]  # codes of the languages in the dictionary
    normalizes: bool = False  # whether audio is normalized to mean 0 and variance 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """The names and options of a kind of model in both systems.

    Attributes:
        name: model_type in config.json, which is the value of --family.
        architectures: classes that config.json may name; to-hf writes the first.
        prefix: start of all tensor names except the head's; if a model was saved without its head, its
            names lack this prefix.
        arch: our architecture, whose defaults apply.
        task: our task, which the checkpoint names.
        words: further command-line arguments of fairseq-train.
        names: the tensors.
        options: the options that both systems have.
        fixed: our options that must have these values.
        assumed: their options that must have these values, if config.json has the key.
        ignored: pattern of their options that do not change outputs, or that `read_more` and `setup` read.
        written: further entries of config.json.
        dropped: pattern of their tensors without a counterpart, such as position tables that are computed.
        zeros: shapes of their tensors that must be zero, because our model does not have them; a word of a
            shape is a number or a key of `vocabulary_sizes`.
        unused: our tensors that transformers' model lacks -> shapes of zeros to write; to-hf omits these
            tensors.
        summed: our tensor -> their tensor whose only row is added to our tensor.
        constants: our tensors that have no counterpart, such as the version of an encoder.
        vocabulary_sizes: key of config.json for a vocabulary size -> our embedding table.
        form: form of the symbol of a language in our dictionary, such as __{}__; empty without languages.
        vocabulary: kind of tokenizer.
        setup: function that returns further options of the task, such as its languages.
        read_more: function that returns further options of our model for a config.json.
        write_more: function (options of our model and task) -> further entries of config.json.
    """

    name: str
    architectures: tuple[str, ...]
    prefix: str
    arch: str
    task: str
    names: tuple[Names, ...]
    options: tuple[Option, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    ignored: str = ""
    dropped: str = ""
    zeros: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    summed: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    vocabulary_sizes: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    form: str = ""
    vocabulary: str = ""
    setup: Callable[[Setup], dict[str, Any]] = lambda setup: {}
    read_more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    write_more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda options: {}

    def rows(self, options: Mapping[str, Any]) -> list[Row]:
        """Return all tensors of a model that has these fairseq options."""
        return [row for names in self.names for row in names.rows(options)]

    def stacks(self, options: Mapping[str, Any]) -> dict[str, tuple[list[str], tuple[int, ...]]]:
        """Return our name of each stacked tensor -> its E names in transformers, and one expert's shape."""
        return {}

    def notes(self, options: Mapping[str, Any]) -> list[str]:
        """Return notes on differences between the systems for a model with these fairseq options."""
        return []

    def read_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return our options for a config.json.

        Raises:
            ValueError: a value has no counterpart.
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
        """Return the vocabulary sizes that config.json must have for our tensors."""
        return {key: len(weights[name]) for key, name in self.vocabulary_sizes.items()}

    def differing(self, options: Mapping[str, Any]) -> list[str]:
        """Return our options that differ from `fixed`. An option that is absent, None or "" is off."""
        pairs = ((key, options.get(key), value) for key, value in self.fixed.items())
        return [key for key, own, value in pairs if (own or value) and own != value]

    def write_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.json for our options.

        Raises:
            ValueError: a value has no counterpart.
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
    """Return the tensors of the layers of an encoder or decoder with fairseq's names after the prefix.

    Args:
        side: encoder or decoder.
        theirs: their prefix of the layers' names; by default model.SIDE.layers.
        has_cross_attention: by default, whether `side` is decoder.
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
