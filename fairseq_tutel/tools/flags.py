"""flags: print the experts' flags with their help.

`fairseq-train --help` leaves out those of an architecture.
"""

import argparse
import dataclasses
import sys
import textwrap
from typing import Any


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser("flags", help="print the experts' flags", description=__doc__)
    parser.add_argument(
        "pattern", nargs="?", default="", help="only those that have it in their name or help"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the flags that match, by what takes them."""
    try:
        from fairseq_tutel.criterions.gate_loss import GateLossOptions
        from fairseq_tutel.plugin.flags import EncoderDecoderOptions, SystemOptions
    except ImportError as error:
        sys.exit(f"error: flags needs fairseq, which cannot be imported: {error}.")
    found = False
    for title, options in (
        ("of the moe_ architectures", EncoderDecoderOptions),
        ("of every task", SystemOptions),
        ("of the moe_ criterions", GateLossOptions),
    ):
        lines = list(_lines(options, arguments.pattern.lower()))
        if lines:
            found = True
            print(f"{title}:", *lines, sep="\n")
    if not found:
        sys.exit(f"error: no flag has {arguments.pattern!r} in its name or help.")


def _lines(options: type, pattern: str) -> Any:
    """Yield the name and the help of each flag that matches."""
    for item in dataclasses.fields(options):
        flag = "--" + item.name.replace("_", "-")
        text = item.metadata.get("help", "").replace("%%", "%")
        # Also as one would write it who has it in a file: topk, top_k.
        names = f"{flag} {item.name} {item.name.replace('_', '')}"
        if item.name != "_name" and pattern in f"{names} {text}".lower():
            yield f"  {flag}"
            yield textwrap.fill(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
