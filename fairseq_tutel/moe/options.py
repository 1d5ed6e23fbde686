"""What an option is: the parts of its entry in config.py's table, its names, and what refuses a value.

A key is its name in a configuration (moe_top_k), a flag that on a command line (--moe-top-k).
"""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

T = TypeVar("T")
# A rule: what must hold of a value, and how the sentence that refuses it ends.
Rule = tuple[Callable[[Any], bool], str]
# Of an option's type, what a bad value should have been.
KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
}


@dataclass(frozen=True)
class Condition:
    """What keeps an option from its effect, or from being given at all, and the words that say so.

    Attributes:
        holds: of the facts; see Option.
        words: that follow the option's name and value in a message, with facts `f` in braces.
    """

    holds: Callable[[Any], bool]
    words: str


def because(holds: Callable[[Any], bool], reason: str) -> Condition:
    """Return that an option has no effect where this holds."""
    return Condition(holds, f": {reason}")


def needs(holds: Callable[[Any], bool], what: str) -> Condition:
    """Return that an option has no effect where this does not hold."""
    return Condition(lambda facts: not holds(facts), f" without {what}")


@dataclass(frozen=True, kw_only=True)
class Option:
    """An entry of the table.

    Attributes:
        default: the value where nobody gives one.
        help: what it does, without unit and default.
        of: whose configuration has the key: model, task or criterion; empty: no flag is made for it.
        theme: its heading in docs/flags.md.
        unit: of a number, where it has one.
        choices: the values that there are, where they are words.
        rule: what else must hold of a value.
        idle: on `Facts` of plugin/announce: when another value than the default has no effect in a
            training; the first that holds is told.
        excluded: on a MoEConfig: when another value than the default is refused.
        of_any_training: of a task's option: it has its effect on a model without experts too.
        same_as: of an older name: the field of MoEConfig and the value that it stands for.
        common: whether a value is what layers of other systems compute, which lack the option.
        metas: Meta's branch has it in its task and criterion too.
        flag: where it is not the key's.
        name: of its field.
        key: in fairseq's configuration.
        type: of its values.
    """

    default: Any
    help: str
    of: str = ""
    theme: str = ""
    unit: str = ""
    choices: tuple[str, ...] = ()
    rule: Rule | None = None
    idle: tuple[Condition, ...] = ()
    excluded: tuple[Condition, ...] = ()
    of_any_training: bool = False
    same_as: tuple[str, Any] | None = None
    common: Callable[[Any], bool] | None = None
    metas: bool = False
    flag: str = ""
    name: str = ""
    key: str = ""
    type: Any = None

    @property
    def label(self) -> str:
        """How messages name it: its field, and its flag where that is another word."""
        if not self.flag or self.name == self.key:
            return self.flag or self.name
        return f"{self.name} ({self.flag})"

    @property
    def text(self) -> str:
        """Its help with the unit."""
        return f"{self.help}; in {self.unit}" if self.unit else self.help

    @property
    def shown_default(self) -> str:
        """Its default, as a reader is told it."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default) or "empty"


def key_of(flag: str) -> str:
    """Return the key of a flag: --moe-top-k -> moe_top_k."""
    return flag.removeprefix("--").replace("-", "_")


def flag_of(key: str) -> str:
    """Return the flag of a key: moe_top_k -> --moe-top-k."""
    return "--" + key.replace("_", "-")


def option(default: Any, help: str = "", **parts: Any) -> Any:
    """Return the dataclass field of an option; `parts` are the attributes of Option."""
    return field(default=default, metadata={"option": Option(default=default, help=help, **parts)})


_made: dict[type, tuple[Option, ...]] = {}


def options_in(config: type) -> tuple[Option, ...]:
    """Return the options that are a dataclass's fields; a key is its `prefix` and the field's name."""
    if config not in _made:
        prefix = getattr(config, "prefix", "")
        entries = [(item, item.metadata["option"]) for item in fields(config)]
        flags = [o.flag or (flag_of(prefix + item.name) if o.of else "") for item, o in entries]
        _made[config] = tuple(
            replace(o, name=item.name, key=key_of(flag) if o.of else "", flag=flag, type=item.type)
            for (item, o), flag in zip(entries, flags, strict=True)
        )
    return _made[config]


def plain(value: Any) -> Any:
    """Return a value without fairseq's enumeration around it."""
    return getattr(value, "value", value)


def read(config: type[T], cfg: Any) -> T:
    """Return a dataclass of options as a configuration has them, and the default of a key that it lacks.

    Args:
        config: the dataclass, whose fields are keys.
        cfg: a part of a FairseqConfig, a command line, or None.
    """
    values = {}
    for item in options_in(config):
        value = plain(getattr(cfg, item.key, item.default))
        # --model-overrides may give a number where a list of numbers may stand.
        values[item.name] = str(value) if item.type is str else value
    return config(**values)


def refuse_bad_values(config: Any) -> None:
    """Refuse a value that is not of its option's type, none of its choices, or against its rule.

    Raises:
        ValueError: naming option, value and fix.
    """
    for entry in options_in(type(config)):
        value = getattr(config, entry.name)
        rule = one_of(entry.choices) if entry.choices else entry.rule
        if not _is_of_type(value, entry.type):
            raise ValueError(f"{entry.label} is {value!r}; give {KINDS[entry.type]}.")
        if rule is not None and not rule[0](value):
            shown = repr(value) if isinstance(value, str) else value
            raise ValueError(f"{entry.label} is {shown}; {rule[1]}.")


def refuse_excluded(config: Any) -> None:
    """Refuse an option, not at its default, beside another one that leaves it nothing to do.

    Raises:
        ValueError: naming both.
    """
    for entry in options_in(type(config)):
        value = getattr(config, entry.name)
        for condition in entry.excluded if value != entry.default else ():
            if condition.holds(config):
                reason = condition.words.format(f=config)
                raise ValueError(f"{entry.label} is {value} but {reason}; drop one of the two.")


def _is_of_type(value: Any, kind: Any) -> bool:
    if kind is int:
        return is_whole(value)
    return is_number(value) if kind is float else isinstance(value, kind)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, Python's or NumPy's, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, Python's or NumPy's, and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_custom(name: str) -> bool:
    """Whether a gate's or expert's type names a class of the user's, package.module.Class."""
    return "." in name


def one_of(names: tuple[str, ...], or_class: bool = False) -> Rule:
    """Return the rule of a name from a list, or, where that is allowed, of a class of the user's."""
    classes = ", or package.module.Class" if or_class else ""
    return (
        lambda v: v in names or (or_class and is_custom(v)),
        f"choose one of {', '.join(names)}{classes}",
    )


def whole(least: int, most: int | None = None, unit: str = "") -> Rule:
    """Return the rule of a whole number, of some unit, within bounds."""
    bounds = f", at least {least}" if most is None else f" from {least} to {most:,}"
    high = math.inf if most is None else most
    return (
        lambda v: is_whole(v) and least <= v <= high,
        f"give a whole number{unit and f' of {unit}'}{bounds}",
    )


AT_LEAST_0, AT_LEAST_1 = whole(0), whole(1)
CAPACITY: Rule = (lambda v: abs(v) <= 1e6, "give a finite number, at most a million")
NOT_NEGATIVE: Rule = (lambda v: 0 <= v < math.inf, "give a finite number, at least 0")
POSITIVE: Rule = (lambda v: 0 < v < math.inf, "give a finite number above 0")
PROBABILITY: Rule = (lambda v: 0 <= v < 1, "give a number from 0 to below 1")
