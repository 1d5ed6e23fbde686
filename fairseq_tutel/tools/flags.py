"""flags: print the experts' flags with their help.

`fairseq-train --help` leaves out those of an architecture.
"""

import argparse
import sys
import textwrap
from typing import Any

from fairseq_tutel.moe.config import options_of
from fairseq_tutel.moe.options import Option


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser("flags", help="print the experts' flags", description=__doc__)
    parser.add_argument(
        "pattern", nargs="?", default="", help="only those that have it in their name or help"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the flags that match, by what takes them."""
    found = False
    for title, owner in (
        ("of the moe_ architectures", "model"),
        ("of every task", "task"),
        ("of the moe_ criterions", "criterion"),
    ):
        options = [o for o in options_of(owner) if _matches(o, arguments.pattern.lower())]
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
    # Also as one would write it who has it in a file: topk, top_k.
    names = f"{option.flag} {option.key} {option.key.replace('_', '')}"
    return pattern in f"{names} {option.text}".lower()
