"""Write the tables of names and flags into README.md, from the code.

`python docs/make_tables.py` rewrites them; with --check it only says whether they are up to date.
"""

from pathlib import Path

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_REGISTRY

import page
from fairseq_tutel import plugin
from fairseq_tutel.plugin import flags

README = Path(__file__).resolve().parents[1] / "README.md"


def names_table() -> str:
    """Return the table of everything that is registered."""
    rows = [
        [f"architectures of `{model}`", _codes(ARCH_MODEL_INV_REGISTRY[model])]
        for model in ARCH_MODEL_INV_REGISTRY
        if model.startswith("moe_")
    ]
    for kind, registry in (
        ("tasks", TASK_REGISTRY),
        ("criterions", CRITERION_REGISTRY),
        ("optimizers", OPTIMIZER_REGISTRY),
    ):
        rows.append([kind, _codes(name for name in registry if name.startswith("moe_"))])
    return page.table(rows, ["what", "names"])


def flags_table(options: type, leave_out: tuple[str, ...] = ()) -> str:
    """Return the table of one set of options, help texts included."""
    made = options()
    rows = []
    for key, default in flags.defaults(options).items():
        if key not in leave_out:
            text = made._get_help(key).replace("%%", "%").replace("|", "\\|")
            value = getattr(default, "value", default)
            shown = "off" if value is False else f"`{value}`"
            rows.append([f"`--{key.replace('_', '-')}`", shown, text.split(" [default")[0]])
    return page.table(rows, ["flag", "default", "meaning"])


def _codes(names) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def tables() -> dict[str, str]:
    """Return every table by the name of its place in the README."""
    plugin.register()
    return {
        "names": names_table(),
        "model flags": flags_table(flags.EncoderDecoderOptions),
        "criterion flags": flags_table(flags.GateLossOptions),
        "task flags": flags_table(flags.SystemOptions),
    }


def filled_in(text: str) -> str:
    """Return the README's text with each table in its place."""
    return page.filled(text, README.name, tables())


if __name__ == "__main__":
    page.run(README, filled_in, __doc__)
