"""flags: print the plugin's flags with their help; `fairseq-train --help` omits flags of architectures."""

import argparse
import sys
import textwrap
from typing import Any

from fairseq_tutel.distillation.options import DistillationConfig
from fairseq_tutel.ensemble.options import CMCLConfig, EnsembleConfig
from fairseq_tutel.moe.option_table import options_of
from fairseq_tutel.options.option import Option, options_in
from fairseq_tutel.vision.options import ImageConfig, SwinConfig, SwinExpertsConfig

# Options that are defined outside of moe/: (title, dataclasses).
OTHER_TABLES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("of the task image_classification", (ImageConfig,)),
    ("of swin_v2 and swin_v2_moe", (SwinConfig, SwinExpertsConfig)),
    ("of the architecture ensemble_of", (EnsembleConfig,)),
    ("of the criterion cmcl", (CMCLConfig,)),
    ("of the criterion moe_distillation", (DistillationConfig,)),
)


def add_to(tools: Any) -> None:
    """Add this tool as a subcommand of `python -m fairseq_tutel`."""
    parser = tools.add_parser("flags", help="print the plugin's flags", description=__doc__)
    parser.add_argument(
        "pattern", nargs="?", default="", help="print only flags with this text in their name or help"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the flags that match the pattern, grouped by architecture, task and criterion."""
    found = False
    for title, known in (
        ("of the moe_ architectures", options_of("model")),
        ("of every task", options_of("task")),
        ("of the moe_ criterions", options_of("criterion")),
        *((title, [o for table in tables for o in options_in(table)]) for title, tables in OTHER_TABLES),
    ):
        options = [o for o in known if _matches(o, arguments.pattern.lower())]
        if options:
            found = True
            print(f"{title}:")
        for option in options:
            text = f"{option.text} [default: {option.shown_default}]"
            print(f"  {option.flag}")
            print(textwrap.fill(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6))
    if not found:
        sys.exit(f"error: no flag has {arguments.pattern!r} in its name or help.")


def _matches(option: Option, pattern: str) -> bool:
    # Other spellings also match, such as topk and top_k.
    names = f"{option.flag} {option.key} {option.key.replace('_', '')}"
    return pattern in f"{names} {option.text}".lower()
