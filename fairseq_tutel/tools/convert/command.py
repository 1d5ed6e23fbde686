"""convert: write a checkpoint anew: from or to another system, or another kind of model."""

import argparse
import sys
from types import ModuleType
from typing import Any

from fairseq_tutel.checkpoint.safe_globals import let_checkpoints_load
from fairseq_tutel.tools.convert import (
    convert_to_meta,
    convert_to_tutel,
    dense,
    merge,
    meta,
    prune,
    sharded,
    tutel,
    upcycle,
)
from fairseq_tutel.tools.late_parser import LateParser

# Each is a module with `add_to(kinds)`, which adds its options and, as their default `convert`, a function
# of the parsed arguments that raises ValueError where the conversion cannot be done.
KINDS: tuple[ModuleType, ...] = (
    sharded,
    upcycle,
    merge,
    prune,
    dense,
    meta,
    convert_to_meta,
    tutel,
    convert_to_tutel,
)


def add_to(tools: Any) -> None:
    """Add the tool to the command line."""
    parser = tools.add_parser(
        "convert",
        help="convert checkpoints from and to other systems and models",
        description=__doc__,
    )
    kinds = parser.add_subparsers(
        dest="kind", required=True, metavar="KIND", parser_class=LateParser
    )
    for kind in KINDS:
        kind.add_to(kinds)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Convert what the command line names; end with one sentence where that cannot be done."""
    let_checkpoints_load()
    try:
        arguments.convert(arguments)
    except (ImportError, ValueError) as error:
        sys.exit(f"error: {error}")
