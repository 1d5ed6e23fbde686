"""Options that all benchmarks have, and the handling of invalid values."""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.output import BadOption, refuse_unwritable


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with --json and --quick."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file of the results, written after every configuration")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny shapes and two rounds, as a smoke test; the times are meaningless",
    )
    return parser


def positive(text: str) -> int:
    """Parse an integer of at least 1; argparse uses this function as a type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def run(
    parser: argparse.ArgumentParser, words: list[str] | None, measure: Callable[[argparse.Namespace], int]
) -> int:
    """Parse the command line, check that --json can be written, and measure; return the exit status."""
    options = parser.parse_args(words)
    try:
        refuse_unwritable(options.json, "--json")
        return measure(options)
    except BadOption as error:
        parser.error(str(error))


def shown(options: argparse.Namespace) -> dict[str, object]:
    """Return the options to write to the --json file, without the path of this file."""
    return {key: value for key, value in vars(options).items() if key != "json"}
