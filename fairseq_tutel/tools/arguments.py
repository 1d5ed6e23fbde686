"""Options that tools share: whole numbers of a model or cluster, and files to write."""

import argparse
from collections.abc import Sequence
from pathlib import Path

# Key, default, meaning.
Number = tuple[str, int, str]
# Bytes of an element.
DTYPES = {"fp32": 4, "fp16": 2, "bf16": 2}


def option(key: str) -> str:
    """Return the option of a key."""
    return "--" + key.replace("_", "-")


def add_numbers(parser: argparse.ArgumentParser, numbers: Sequence[Number]) -> None:
    """Add an option for every number."""
    for key, default, meaning in numbers:
        parser.add_argument(
            option(key), type=int, default=default, metavar="N", help=f"{meaning} [{default}]"
        )


def refuse_numbers(arguments: argparse.Namespace, numbers: Sequence[Number]) -> None:
    """Refuse what is below 1, and more experts of a token than there are.

    Raises:
        ValueError: naming the option and the fix.
    """
    for key, _, _ in numbers:
        if getattr(arguments, key) < 1:
            raise ValueError(
                f"{option(key)} is {getattr(arguments, key)}; give a number of at least 1."
            )
    if arguments.top_k > arguments.experts:
        raise ValueError(
            f"--top-k is {arguments.top_k} of {arguments.experts} --experts; give no more than these."
        )


def refuse_dtype(name: str) -> None:
    """Refuse a name that is none of DTYPES.

    Raises:
        ValueError: naming them.
    """
    if name not in DTYPES:
        raise ValueError(f"--dtype is {name}; give one of {', '.join(DTYPES)}.")


def refuse_output(name: str, path: Path | None) -> None:
    """Refuse a place where no file can be written, before any work.

    Raises:
        ValueError: naming the option and the fix.
    """
    if path and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{name} is {path}; give the name of a file in an existing folder.")
