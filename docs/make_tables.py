"""Writes all flags, names and metrics into docs/flags.md.

`python docs/make_tables.py` rewrites the page; with --check it only reports whether it is up to date.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_REGISTRY

import page
from fairseq_tutel import plugin
from fairseq_tutel.moe.metrics import METRICS
from fairseq_tutel.option import Option
from fairseq_tutel.tools.flags import THEMES, all_options

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ROOT / "docs" / "flags.md"
WIDTH = 110


def flags_by_theme() -> str:
    """Return the list of all flags under their headings."""
    found = {theme: [o for o in all_options() if o.theme == theme] for theme in THEMES}
    assert sum(map(len, found.values())) == len(all_options()), "a theme is missing"
    sections = [f"## {theme}\n\n" + "\n".join(map(_entry, options)) for theme, options in found.items()]
    return "\n\n".join(sections)


def _entry(option: Option) -> str:
    """Return the line of an option: `--flag` (owner, values, default): help."""
    takes = re.sub(", (?=[^,]*$)", " or ", ", ".join(f"`{each}`" for each in option.choices))
    if not takes and option.rule and not option.same_as:
        takes = re.split(r"give |choose ", option.rule[1], maxsplit=1)[1].replace("one of ", "")
    default = "off" if option.type is bool else _code(option.default)
    facts = "; ".join(filter(None, (option.of, takes, f"default {default}")))
    return _wrapped(f"- `{option.flag}` ({facts}): {option.text}.")


def names() -> str:
    """Return the list of registered architectures, tasks, criterions and optimizers."""
    kinds = {
        f"architectures of `{model}`": archs
        for model, archs in ARCH_MODEL_INV_REGISTRY.items()
        if model.startswith("moe_")
    }
    kinds |= {
        "tasks": TASK_REGISTRY,
        "criterions": CRITERION_REGISTRY,
        "optimizers": OPTIMIZER_REGISTRY,
    }
    return "\n".join(_wrapped(f"- {kind}: {_codes(found)}") for kind, found in kinds.items())


def metrics() -> str:
    """Return the list of metrics, J for the choice, with the names of their lists over layers."""
    return "\n".join(
        _wrapped(
            f"- `{metric.name.format('J')}`"
            + (f" (list: `moe_layers_{metric.layers.format('J')}`)" if metric.layers else "")
            + f": {metric.help}"
        )
        for metric in METRICS
    )


def _code(value: object) -> str:
    return f"`{value}`" if value != "" else "empty"


def _codes(registered: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(registered) if name.startswith("moe_"))


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def filled_in(text: str) -> str:
    """Return the text of the page with the generated texts."""
    plugin.register()
    return page.filled(
        text, FLAGS.name, {"flags": flags_by_theme(), "names": names(), "metrics": metrics()}
    )


if __name__ == "__main__":
    page.run(FLAGS, filled_in, __doc__)
