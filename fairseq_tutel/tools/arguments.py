"""Checks numbers and output files of the tools' command lines, and writes output files."""

import argparse
import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairseq_tutel.files import TEMPORARY
from fairseq_tutel.option import flag_of
from fairseq_tutel.tools.parser import Number

DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}  # bytes of an element


def refuse_numbers(arguments: argparse.Namespace, numbers: Sequence[Number]) -> None:
    """Raise ValueError for a number below 1, a --top-k above --experts or an unknown --dtype."""
    for key, _, _ in numbers:
        if getattr(arguments, key) < 1:
            raise ValueError(f"{flag_of(key)} is {getattr(arguments, key)}; give a number of at least 1.")
    if arguments.top_k > arguments.experts:
        raise ValueError(
            f"--top-k is {arguments.top_k}, but --experts is {arguments.experts}; give at most "
            f"{arguments.experts}."
        )
    if arguments.dtype is not None and arguments.dtype not in DTYPES:
        raise ValueError(f"--dtype is {arguments.dtype}; give one of {', '.join(DTYPES)}.")


def refuse_output(
    output: Path, inputs: Sequence[Path] = (), overwrite: bool = True, flag: str = "--output"
) -> None:
    """Raise ValueError if an output file cannot be written, or would replace an input file.

    Tools call this before any work. `overwrite` allows the output to replace other files. With inputs, the
    output must be an ordinary file.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"{flag} is {output}; give the name of a file in an existing folder.")
    if inputs and output.exists() and not output.is_file():  # a device
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

    With `overwrite`, a folder may be replaced if it has the file `mark`, which the tool writes, and does
    not contain the input.
    """
    if not output.exists() and not output.is_symlink():
        return
    if output.is_symlink() or not overwrite:
        raise ValueError(f"--output {output} exists; give another path, or add --overwrite.")
    if not (output / mark).is_file():
        raise ValueError(f"--output {output} has no {mark}, so it is not replaced; give a new path.")
    if source.resolve().is_relative_to(output.resolve()):
        raise ValueError(f"--output is {output}, which holds the input; give a new path.")


def refuse_folder(name: str, folder: str) -> None:
    """Raise ValueError if an input folder does not exist; fairseq allows several, joined by colons."""
    for each in folder.split(":"):
        if not Path(each).is_dir():
            raise ValueError(f"{name} is {each}, which is not a folder; give the folder of the data set.")


@contextlib.contextmanager
def writing(path: Path, flag: str = "--output") -> Iterator[Path]:
    """Yield a temporary path to write to; after the block, rename the file to `path`.

    The temporary path has the same suffix. Devices and links are written directly.
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


@contextlib.contextmanager
def needing(what: str, extra: str = "") -> Iterator[None]:
    """Convert an ImportError in the block to a ValueError that names the package or extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = f"'fairseq-tutel[{extra}]'" if extra else error.name
        raise ValueError(
            f"{what} needs {error.name}, which is not installed; run pip install {package}."
        ) from error
