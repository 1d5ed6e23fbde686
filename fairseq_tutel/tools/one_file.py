"""What every tool that makes one file of one checkpoint is told: --input, --output, --overwrite."""

import argparse
from pathlib import Path

from fairseq_tutel.tools.convert.files import add_overwrite, output_path, refuse_output


def add_to(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options.

    Args:
        parser: of the tool.
        what: the input is, for the help.
    """
    parser.add_argument("--input", required=True, metavar="FILE", help=what)
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    add_overwrite(parser)


def paths(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Return the input and the output, before any work.

    Raises:
        ValueError: the output can not be written, or is the input.
    """
    source, output = Path(arguments.input), output_path(arguments.output)
    refuse_output(output, [source], arguments.overwrite)
    return source, output
