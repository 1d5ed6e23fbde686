"""Checks numbers and output files of the tools' command lines, writes output files, and formats tables."""

import argparse
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fairseq_tutel import __version__
from fairseq_tutel.files import TEMPORARY

DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}  # Bytes of one element.


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a function that parses an argument as an integer within bounds."""

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            limit = "" if most is None else f" and at most {most}"
            raise argparse.ArgumentTypeError(f"{text} is out of range; give at least {least}{limit}")
        return value

    return number


def above_0(text: str) -> float:
    """Parse an argument that is a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def refuse_output(
    output: Path, inputs: Sequence[Path] = (), overwrite: bool = True, flag: str = "--output"
) -> None:
    """Raise ValueError if an output file cannot be written, or would replace an input file.

    A tool calls refuse_output() before all other work. With `overwrite`, the output may replace a file that
    is not an input. If there are inputs, the output must be a regular file.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"{flag} is {output}; give the name of a file in an existing folder.")
    if inputs and output.exists() and not output.is_file():
        raise ValueError(f"{flag} is {output}, which is not an ordinary file; give another name.")
    for path in inputs:
        if output.exists() and path.exists() and output.samefile(path):
            raise ValueError(
                f"{flag} is {output}, which would overwrite the input {path}; give another name."
            )
    if output.is_file() and not overwrite:
        raise ValueError(f"{flag} {output} exists; give another name, or add --overwrite.")


def refuse_output_folder(output: Path, source: Path, mark: str, overwrite: bool) -> None:
    """Raise ValueError if an output folder exists and may not be replaced.

    With `overwrite`, a folder may be replaced if it has the file `mark` and does not contain the input.
    """
    if not output.exists() and not output.is_symlink():
        return
    if output.is_symlink() or not overwrite:
        raise ValueError(f"--output {output} exists; give another path, or add --overwrite.")
    if not (output / mark).is_file():
        raise ValueError(f"--output {output} has no {mark}, so it is not replaced; give a new path.")
    if source.resolve().is_relative_to(output.resolve()):
        raise ValueError(f"--output is {output}, which holds the input; give a new path.")


@contextlib.contextmanager
def writing(path: Path, flag: str = "--output") -> Iterator[Path]:
    """Yield the path of a temporary file to write to, and rename the file to `path` after the block.

    The temporary file has the same suffix as `path`. A device or symbolic link is written to directly.
    """
    is_plain = not os.path.lexists(path) or (path.is_file() and not path.is_symlink())
    beside = path.with_stem(f"{path.stem}.{secrets.token_hex(4)}{TEMPORARY}") if is_plain else path
    try:
        yield beside
        if is_plain:
            os.replace(beside, path)
    except OSError as error:
        raise ValueError(f"{flag} is {path}, which cannot be written: {error.strerror}.") from error
    finally:
        if is_plain:
            beside.unlink(missing_ok=True)


def template_of(path: Path) -> Any:
    """Return the Jinja template in a file; the template escapes HTML, and has the variable `version`."""
    from jinja2 import Environment, StrictUndefined

    facts: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined}
    templates = Environment(trim_blocks=True, lstrip_blocks=True, **facts)
    return templates.from_string(path.read_text(encoding="utf-8"), globals={"version": __version__})


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the text of a table with two spaces between columns; the header is the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [map(str.ljust, row, widths) for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)
