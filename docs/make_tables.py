"""Writes all flags, names and metrics into docs/flags.md.

`python docs/make_tables.py` rewrites the page; with --check it only reports whether it is up to date.
"""

import re
import textwrap
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
WIDTH = 160
# Rules of options -> short forms for the page.
SHORT = {
    "a whole number of MoE layers, at least ": "≥ ",
    "a whole number, at least ": "≥ ",
    "a finite number, at least ": "≥ ",
    "a finite number above ": "> ",
    "a finite number from ": "",
    "a number from ": "",
    "a number of at least ": "≥ ",
    "a number above ": "> ",
    ", at most ": ", ≤ ",
}


def flags_by_theme() -> str:
    """Return the list of all flags under their headings."""
    found = {theme: [o for o in all_options() if o.theme == theme] for theme in THEMES}
    assert sum(map(len, found.values())) == len(all_options()), "a theme is missing"
    sections = [f"## {theme}\n\n" + "\n".join(map(_entry, options)) for theme, options in found.items()]
    return "\n\n".join(sections)


def _entry(option: Option) -> str:
    """Return the line of an option: `--flag` (default; values; owner): help."""
    takes = ""
    if option.choices:
        takes = ", ".join(each for each in option.choices if each != option.default)
    elif option.rule and not option.same_as:
        takes = re.split(r"give |choose ", option.rule[1], maxsplit=1)[1].replace("one of ", "")
        for words, short in SHORT.items():
            takes = takes.replace(words, short)
    default = "" if option.type is bool else _code(option.default)
    facts = "; ".join(filter(None, (default, takes, "" if option.of == "model" else option.of)))
    return _wrapped(f"- `{option.flag}`{f' ({facts})' if facts else ''}: {option.text}.")


def names() -> str:
    """Return the list of registered architectures, tasks, criterions and optimizers, without `moe_`."""
    models = []
    for model, archs in ARCH_MODEL_INV_REGISTRY.items():
        if model.startswith("moe_"):
            own = _plain(model)
            others = (_plain(each).removeprefix(own) for each in sorted(archs) if each != model)
            models.append(own + f" ({', '.join(others)})" * (set(archs) != {model}))
    kinds = {"tasks": TASK_REGISTRY, "criterions": CRITERION_REGISTRY, "optimizers": OPTIMIZER_REGISTRY}
    lines = ["models, with their other architectures: " + ", ".join(models)]
    for kind, found in kinds.items():
        lines.append(f"{kind}: " + ", ".join(_plain(name) for name in sorted(found) if name[:4] == "moe_"))
    return "\n".join(_wrapped(f"- {line}") for line in lines)


def _plain(name: str) -> str:
    return name.removeprefix("moe_")


def metrics() -> str:
    """Return the list of metrics with the names of their lists over layers; J stands for the choice."""
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
