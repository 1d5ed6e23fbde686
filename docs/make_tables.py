"""Write the tables of names and flags into README.md, from the code.

`python docs/make_tables.py` rewrites them; with --check it only says whether they are up to date.
"""

import argparse
import re
import sys
from pathlib import Path

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from tabulate import tabulate

from fairseq_tutel import flags, plugin
from fairseq_tutel.criterions.gate_loss import GateLossOptions

README = Path(__file__).resolve().parents[1] / "README.md"


def names_table() -> str:
    """Return the table of everything that is registered."""
    rows = [
        [f"architectures of `{model}`", _codes(ARCH_MODEL_INV_REGISTRY[model])]
        for model in ("moe_transformer_lm", "moe_transformer", "moe_roberta", "moe_bart")
    ]
    for kind, registry in (
        ("tasks", TASK_REGISTRY),
        ("criterions", CRITERION_REGISTRY),
        ("optimizers", OPTIMIZER_REGISTRY),
    ):
        rows.append([kind, _codes(name for name in registry if name.startswith("moe_"))])
    return tabulate(rows, ["what", "names"], tablefmt="github")


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
    return tabulate(rows, ["flag", "default", "meaning"], tablefmt="github", disable_numparse=True)


def _codes(names) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def tables() -> dict[str, str]:
    """Return every table by the name of its place in the README."""
    plugin.register()
    return {
        "names": names_table(),
        "model flags": flags_table(flags.EncoderDecoderOptions),
        "criterion flags": flags_table(GateLossOptions),
        "task flags": flags_table(flags.SystemOptions),
    }


def filled_in(text: str) -> str:
    """Return the README's text with each table between its two markers."""
    for name, table in tables().items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, t=table: m[1] + t + "\n" + m[2], text, flags=re.S)
        if count != 1:
            raise ValueError(f"README.md has {count} places for the table {name!r}; it needs one.")
    return text


def main() -> None:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if out of date"
    )
    arguments = parser.parse_args()
    old = README.read_text()
    new = filled_in(old)
    if arguments.check:
        sys.exit("README.md is out of date; run python docs/make_tables.py" if new != old else 0)
    README.write_text(new)


if __name__ == "__main__":
    main()
