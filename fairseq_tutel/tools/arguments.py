"""Shared parts of command lines: numbers, input and output files, options that are added late."""

import argparse
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fairseq_tutel.files.atomic import TEMPORARY
from fairseq_tutel.options.option import flag_of

Number = tuple[str, int, str]  # key, default, help
DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}  # bytes of an element


def add_numbers(parser: argparse.ArgumentParser, numbers: Sequence[Number]) -> None:
    """Add an option for each number."""
    for key, default, meaning in numbers:
        parser.add_argument(
            flag_of(key), type=int, default=default, metavar="N", help=f"{meaning} [{default}]"
        )


def refuse_numbers(arguments: argparse.Namespace, numbers: Sequence[Number]) -> None:
    """Check that numbers are at least 1, --top-k is at most --experts, and --dtype is in DTYPES."""
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


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add --overwrite, without which no file is replaced."""
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")


def output_path(text: str) -> Path:
    """Return --output as a path."""
    if text.endswith("/"):
        raise ValueError(f"--output is {text}; give the name of a file, without / at its end.")
    return Path(text)


def refuse_output(
    output: Path, inputs: Sequence[Path] = (), overwrite: bool = True, flag: str = "--output"
) -> None:
    """Check before any work that an output can be written without replacing an input.

    `overwrite` allows it to replace another file. With inputs, it must be an ordinary file.
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
    if output.exists() and not overwrite:
        raise ValueError(f"{flag} {output} exists; give another name, or add --overwrite.")


@contextlib.contextmanager
def writing(path: Path, flag: str = "--output") -> Iterator[Path]:
    """Yield a temporary name with the same suffix, and replace the file after the block.

    Devices and links are written directly.
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
    """Turn a failed import in the block into a message that names the package, or the extra, to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = f"'fairseq-tutel[{extra}]'" if extra else error.name
        raise ValueError(
            f"{what} needs {error.name}, which is not installed; pip install {package}."
        ) from error


class LateParser(argparse.ArgumentParser):
    """An ArgumentParser that calls `late` before the first parse, for options that are slow to import."""

    late: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Add the late options, then parse."""
        late, self.late = self.late, None
        if late is not None:
            try:
                late(self)
            except ImportError as error:
                self.error(str(error))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with the message; explain values that look like options."""
        if message.endswith("expected at least one argument"):
            message += " that does not begin with -"
        super().error(message)
