"""The options that every benchmark takes, and how one ends on a bad value."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def add_busy(parser: argparse.ArgumentParser) -> None:
    """Add --busy, for `beside`."""
    parser.add_argument(
        "--busy", action="store_true", help="beside another process that keeps one core busy"
    )


@contextmanager
def beside(busy: bool) -> Iterator[None]:
    """Keep the last of this process's cores busy meanwhile, where that is asked for."""
    if not busy:
        yield
        return
    core = max(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}: pass"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        try:
            yield
        finally:
            other.kill()


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
