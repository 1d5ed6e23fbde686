"""What tools share of a command line: numbers, files to read and write, and options that are made late."""

import argparse
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fairseq_tutel.checkpoint.files import TEMPORARY
from fairseq_tutel.moe.options import flag_of

# Key, default, meaning.
Number = tuple[str, int, str]
# Bytes of an element.
DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}


def add_numbers(parser: argparse.ArgumentParser, numbers: Sequence[Number]) -> None:
    """Add an option for every number."""
    for key, default, meaning in numbers:
        parser.add_argument(
            flag_of(key), type=int, default=default, metavar="N", help=f"{meaning} [{default}]"
        )


def refuse_numbers(arguments: argparse.Namespace, numbers: Sequence[Number]) -> None:
    """Refuse what is below 1, more experts of a token than there are, and a --dtype not in DTYPES.

    Raises:
        ValueError: naming the option and the fix.
    """
    for key, _, _ in numbers:
        if getattr(arguments, key) < 1:
            raise ValueError(
                f"{flag_of(key)} is {getattr(arguments, key)}; give a number of at least 1."
            )
    if arguments.top_k > arguments.experts:
        raise ValueError(
            f"--top-k is {arguments.top_k} of {arguments.experts} --experts; give no more than these."
        )
    if arguments.dtype is not None and arguments.dtype not in DTYPES:
        raise ValueError(f"--dtype is {arguments.dtype}; give one of {', '.join(DTYPES)}.")


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add the option without which no file is replaced."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what --output names, if it is there"
    )


def add_files(
    parser: argparse.ArgumentParser,
    source: str,
    output: str = "the file to write",
    kind: str = "FILE",
) -> None:
    """Add --input, --output and --overwrite.

    Args:
        parser: of a conversion.
        source: what the input is, for the help.
        output: what the output is.
        kind: of name that the output is.
    """
    parser.add_argument("--input", required=True, metavar="FILE", help=source)
    parser.add_argument("--output", required=True, metavar=kind, help=output)
    add_overwrite(parser)


def add_conversion(
    kinds: Any,
    name: str,
    convert: Callable[[argparse.Namespace, Path, Path], None],
    help: str,
    description: str | None,
    source: str,
) -> "LateParser":
    """Add a conversion of one file into another; return its parser, for options of its own.

    Args:
        kinds: all conversions.
        name: of this one.
        convert: is given the arguments, the input, and the output, which can be written.
        help: what it does, in a line.
        description: all that is to say of it.
        source: what the input is, for the help.
    """
    parser: LateParser = kinds.add_parser(name, help=help, description=description)
    add_files(parser, source)

    def run(arguments: argparse.Namespace) -> None:
        source, output = Path(arguments.input), output_path(arguments.output)
        refuse_output(output, [source], arguments.overwrite)
        convert(arguments, source, output)

    parser.set_defaults(convert=run)
    return parser


def output_path(text: str) -> Path:
    """Return --output as a path.

    Raises:
        ValueError: it is written as a folder.
    """
    if text.endswith("/"):
        raise ValueError(f"--output is {text}; give the name of a file, without / at its end.")
    return Path(text)


def refuse_output(
    output: Path, inputs: Sequence[Path] = (), overwrite: bool = True, flag: str = "--output"
) -> None:
    """Refuse an output that can not be written, or that would be lost by it, before any work.

    Args:
        output: the file to write.
        inputs: none of which is replaced, whatever the user says; of a checkpoint, which takes the
            place of what was there, at least one.
        overwrite: whether another file may be replaced.
        flag: that names the output.

    Raises:
        ValueError: naming the output and the fix.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"{flag} is {output}; give the name of a file in an existing folder.")
    if inputs and output.exists() and not output.is_file():  # a device
        raise ValueError(f"{flag} is {output}, which is no ordinary file; give another name.")
    for path in inputs:
        if output.exists() and path.exists() and output.samefile(path):
            raise ValueError(
                f"{flag} is {output}, which would overwrite the input {path}; give another name."
            )
    if output.exists() and not overwrite:
        raise ValueError(f"{flag} {output} exists; give another name, or add --overwrite.")


@contextlib.contextmanager
def writing(path: Path, flag: str = "--output") -> Iterator[Path]:
    """Give a name beside a file to write to in the block: the file is whole or what it was.

    It ends as the file's does. What is no plain file, such as a device or a link, is written itself.

    Raises:
        ValueError: in place of an OSError.
    """
    is_plain = not os.path.lexists(path) or (path.is_file() and not path.is_symlink())
    beside = path.with_stem(f"{path.stem}.{secrets.token_hex(4)}{TEMPORARY}") if is_plain else path
    try:
        yield beside
        if is_plain:
            os.replace(beside, path)
    except OSError as error:
        raise ValueError(
            f"{flag} is {path}, which can not be written: {error.strerror}."
        ) from error
    finally:
        if is_plain:
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def needing(what: str, extra: str = "") -> Iterator[None]:
    """Say of an import within that fails what needs it, and what to install.

    Args:
        what: needs it.
        extra: of this package that brings it; by default it is to be installed by its own name.

    Raises:
        ValueError: in place of a ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        install = f"'fairseq-tutel[{extra}]'" if extra else error.name
        raise ValueError(
            f"{what} needs {error.name}, which is not installed; pip install {install}."
        ) from error


class LateParser(argparse.ArgumentParser):
    """An ArgumentParser whose `late`, if it is set, adds options before the first parse: some take seconds.

    Where it cannot import what it needs, the parser ends as with a bad option.
    """

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
        """End with the message; say of a value that was taken for an option that it was."""
        if message.endswith("expected at least one argument"):
            message += " that does not begin with -"
        super().error(message)
