"""The options that every benchmark takes, and how one ends on a bad value."""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.bad_option import BadOption
from benchmarks.output import refuse_plot_without_matplotlib, refuse_unwritable


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with --json, --plot and --quick."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, help="where to write what was measured, after every configuration"
    )
    parser.add_argument("--plot", type=Path, help="where to draw it, as .png, .svg or .pdf")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny shapes and two rounds, to see that it works; the times mean nothing",
    )
    return parser


def run(
    parser: argparse.ArgumentParser,
    words: list[str] | None,
    measure: Callable[[argparse.Namespace], int],
) -> int:
    """Parse, refuse what cannot be written, and measure; a BadOption becomes the parser's error.

    Returns:
        What `measure` returns, the exit status.
    """
    options = parser.parse_args(words)
    try:
        refuse_unwritable(options.json, "--json")
        refuse_plot_without_matplotlib(options.plot)
        refuse_unwritable(options.plot, "--plot")
        return measure(options)
    except BadOption as error:
        parser.error(str(error))


def shown(options: argparse.Namespace) -> dict[str, object]:
    """Return the options for the file, without its paths."""
    return {key: value for key, value in vars(options).items() if key not in ("json", "plot")}
