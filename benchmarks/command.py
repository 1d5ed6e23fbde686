"""Common options of benchmarks, and the end on a wrong value."""

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
    parser.add_argument("--json", type=Path, help="file of the results, written after every configuration")
    parser.add_argument("--plot", type=Path, help="file of the plot: .png, .svg or .pdf")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny shapes and two rounds, as a smoke test; the times are meaningless",
    )
    return parser


def run(
    parser: argparse.ArgumentParser, words: list[str] | None, measure: Callable[[argparse.Namespace], int]
) -> int:
    """Parse, check outputs, and measure; return the exit status. A BadOption becomes the parser's error."""
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
