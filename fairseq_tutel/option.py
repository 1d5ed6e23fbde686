"""Defines the class `Option`: the name, default, flag and rules of a command-line option."""

import inspect
import math
import numbers
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, TypeVar

from fairseq_tutel.files import shown

T = TypeVar("T")
# A rule is a test of a value, and the end of the error message if the test fails.
Rule = tuple[Callable[[Any], bool], str]
KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of the command line and configuration: default, help text, flag and rules."""

    default: Any
    help: str  # help text without unit and default
    of: str = ""  # owner of the key: model, task or criterion; an option without owner has no flag
    theme: str = ""  # heading in docs/flags.md
    unit: str = ""
    choices: tuple[str, ...] = ()  # the valid values, if values are words
    rule: Rule | None = None  # a further test of a value
    or_class: bool = False  # whether Python code may pass a class instead of a word
    same_as: tuple[str, Any] | None = (
        None  # for an older flag: the MoEConfig field that it sets, and the value
    )
    flag: str = ""  # the flag; if empty, `options_in` makes the flag from the field's name
    name: str = ""  # the name of the dataclass field
    key: str = ""  # the option's name in fairseq's configuration
    type: Any = None

    @property
    def label(self) -> str:
        """The option's name in messages, such as `top_k (--moe-top-k)`."""
        if not self.flag or self.name == self.key:
            return self.flag or self.name
        return f"{self.name} ({self.flag})"

    @property
    def text(self) -> str:
        """The option's help text with its unit."""
        return f"{self.help}; in {self.unit}" if self.unit else self.help

    @property
    def shown_default(self) -> str:
        """The option's default as the documentation shows it."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default) or "empty"


def key_of(flag: str) -> str:
    """Return the configuration key of a flag: --moe-top-k gives moe_top_k."""
    return flag.removeprefix("--").replace("-", "_")


def flag_of(key: str) -> str:
    """Return the flag of a configuration key: moe_top_k gives --moe-top-k."""
    return "--" + key.replace("_", "-")


def option(default: Any, help: str = "", **parts: Any) -> Any:
    """Return a dataclass field that defines an option; `parts` are attributes of `Option`."""
    return field(default=default, metadata={"option": Option(default=default, help=help, **parts)})


def options_in(config: Any) -> tuple[Option, ...]:
    """Return the options of a dataclass; the default key is the class's `prefix` plus the field's name."""
    return _options_in(config)


@cache
def _options_in(config: Any) -> tuple[Option, ...]:
    def named(entry: Option, name: str, type: Any) -> Option:
        type = str if entry.or_class else type
        flag = entry.flag or (flag_of(getattr(config, "prefix", "") + name) if entry.of else "")
        return replace(entry, name=name, key=key_of(flag) if entry.of else "", flag=flag, type=type)

    return tuple(named(item.metadata["option"], item.name, item.type) for item in fields(config))


def documented(config: type) -> str:
    """Return a dataclass's docstring and an entry for each option: type, meaning, unit and default."""
    lines = [inspect.cleandoc(str(config.__doc__)), "", "Attributes:"]
    for item in options_in(config):
        default = "" if item.default is MISSING else f" [{item.shown_default}]"
        lines.append(f"    {item.name} ({item.type.__name__}): {item.text}{default}")
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """Return the plain value of a fairseq enumeration member; return any other object unchanged."""
    return getattr(value, "value", value)


def read(config: type[T], cfg: Any) -> T:
    """Create an options dataclass from a fairseq configuration or None; missing keys get defaults."""
    values = {}
    for item in options_in(config):
        value = plain(getattr(cfg, item.key, item.default))
        # --model-overrides may contain a number for a text option.
        values[item.name] = str(value) if item.type is str else value
    return config(**values)


def refuse_bad_values(config: Any) -> None:
    """Raise ValueError if an option's value has the wrong type, is not a valid choice or breaks a rule."""
    for entry in options_in(type(config)):
        value = getattr(config, entry.name)
        rule = one_of(entry.choices) if entry.choices else entry.rule
        if not (_is_of_type(value, entry.type) or (entry.or_class and isinstance(value, type))):
            raise ValueError(f"{entry.label} is {value!r}; give {KINDS[entry.type]}.")
        if rule is not None and not rule[0](value):
            text = shown(value) if isinstance(value, str) else value
            raise ValueError(f"{entry.label} is {text}; {rule[1]}.")


def _is_of_type(value: Any, kind: Any) -> bool:
    if kind is int:
        return is_whole(value)
    return is_number(value) if kind is float else isinstance(value, kind)


def is_whole(value: Any) -> bool:
    """Return whether a value is a Python or NumPy integer. A boolean is not an integer."""
    kind = type(value)
    return kind is int or (isinstance(value, numbers.Integral) and kind is not bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number of Python or NumPy. A boolean is not a number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_custom(kind: str | type) -> bool:
    """Return whether a gate or expert type is a user's class, or its name: package.module.Class."""
    return isinstance(kind, type) or "." in kind


def one_of(names: tuple[str, ...], or_class: bool = False) -> Rule:
    """Return the rule that a value must be one of these names or, with `or_class`, a user's class."""
    classes = ", or package.module.Class" if or_class else ""
    return (
        lambda v: v in names or (or_class and is_custom(v)),
        f"choose one of {', '.join(names)}{classes}",
    )


def whole(least: int, most: int | None = None, unit: str = "") -> Rule:
    """Return the rule that a value must be an integer within bounds."""
    bounds = f", at least {least}" if most is None else f" from {least} to {most:,}"
    high = math.inf if most is None else most
    return (
        lambda v: is_whole(v) and least <= v <= high,
        f"give a whole number{unit and f' of {unit}'}{bounds}",
    )


def bytes_of(text: str) -> int | None:
    """Parse a size with a unit, such as 512MiB, to bytes; return None for any other text."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) *([KMG]i?B)", text.strip())
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the given message if the condition is false."""
    if not condition:
        raise ValueError(message)


AT_LEAST_0, AT_LEAST_1 = whole(0), whole(1)
CAPACITY: Rule = (lambda v: abs(v) <= 1e6, "give a finite number from -1,000,000 to 1,000,000")
NOT_NEGATIVE: Rule = (lambda v: 0 <= v < math.inf, "give a finite number, at least 0")
POSITIVE: Rule = (lambda v: 0 < v < math.inf, "give a finite number above 0")
PROBABILITY: Rule = (lambda v: 0 <= v < 1, "give a number from 0 to below 1")


# Each of these functions is `option` with a fixed theme (a heading in docs/flags.md) and a fixed owner.
routing = partial(option, theme="Routing", of="model")
capacity = partial(option, theme="Capacity", of="model")
balance = partial(option, theme="Balance", of="model")
experts = partial(option, theme="Experts", of="model")
communication = partial(option, theme="Communication", of="task")
parallelism = partial(option, theme="Parallelism", of="task")
memory = partial(option, theme="Memory", of="task")
logging = partial(option, theme="Logging", of="task")
