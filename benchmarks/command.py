"""Common options of benchmarks, and the end on a wrong value."""

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
    parser.add_argument("--json", type=Path, help="file of the results, written after every configuration")
    parser.add_argument("--plot", type=Path, help="file of the plot: .png, .svg or .pdf")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny shapes and two rounds, as a smoke test; the times are meaningless",
    )
    return parser


def add_busy(parser: argparse.ArgumentParser) -> None:
    """Add --busy, for `busy_core`."""
    parser.add_argument("--busy", action="store_true", help="run another process that keeps one core busy")


@contextmanager
def busy_core(busy: bool) -> Iterator[None]:
    """Keep the last of this process's cores busy during the block, if `busy`."""
    if not busy:
        yield
        return
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        try:
            yield
        finally:
            other.kill()


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
