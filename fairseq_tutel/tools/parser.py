"""Provides the command-line parser of the tools, and the arguments that several tools share.

All tools follow one convention. Inputs are positional arguments and come first. `--output` names the
output. `--overwrite` allows a tool to replace the output. The help shows defaults as [default].
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_tutel.option import Option

EXAMPLE = "example: "


class ToolParser(argparse.ArgumentParser):
    """The parser of a tool or of a subcommand, whose help ends with an example.

    Args:
        example: the arguments of an example command, which the help shows after the tool's name.
        keywords: keyword arguments of ArgumentParser.
    """

    def __init__(self, *, example: str = "", **keywords: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **keywords})
        self.former_input = ""  # An older option for the input, such as --input.
        self.epilog = f"{EXAMPLE}{self.prog} {example}".rstrip()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse words like ArgumentParser, and accept the former option of the input, too."""
        words = sys.argv[1:] if args is None else list(args)
        if self.former_input:
            words = _input_first(words, self.former_input)
        return super().parse_known_args(words, namespace)


class _HelpFormatter(argparse.HelpFormatter):
    """Formats help with paragraphs, and does not wrap the example, which users may copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLE):
            return text
        return "\n\n".join(textwrap.fill(part, width) for part in text.split("\n\n"))


def _input_first(words: list[str], flag: str) -> list[str]:
    """Replace the option `flag` by its values, as positional arguments in front of all other arguments."""
    words = [
        part for word in words for part in (word.split("=", 1) if word.startswith(f"{flag}=") else [word])
    ]
    if flag not in words:
        return words
    start = words.index(flag) + 1
    end = next((i for i in range(start, len(words)) if words[i].startswith("-")), len(words))
    return [*words[start:end], *words[: start - 1], *words[end:]]


def add_input(
    parser: ToolParser, help: str, key: str = "input", former: str = "--input", several: bool = False
) -> None:
    """Add a positional input that was an option in earlier versions; this option is still accepted.

    Args:
        parser: the parser of the tool.
        help: the help text of the input.
        key: the name of the parsed argument; the help shows this name in upper case.
        former: the option in earlier versions.
        several: whether there may be several inputs.
    """
    parser.add_argument(key, nargs="+" if several else None, metavar=key.upper(), help=help)
    parser.former_input = former


def add_output(
    parser: argparse.ArgumentParser,
    help: str,
    default: str | None = None,
    *,
    required: bool = False,
    is_folder: bool = False,
) -> None:
    """Add the options --output and --overwrite."""
    facts: dict[str, Any] = {"type": Path if is_folder else _file, "required": required}
    facts |= {"default": default and Path(default), "metavar": "FOLDER" if is_folder else "FILE"}
    parser.add_argument("--output", help=f"{help} [{default}]" if default else help, **facts)
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")


def _file(text: str) -> Path:
    if text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text} ends with /; give the name of a file.")
    return Path(text)


def add_options(parser: argparse._ActionsContainer, options: Sequence[Option]) -> None:
    """Add a flag for each option of a table; absent flags are None or, for a switch, False."""
    for item in options:
        text = f"{item.text} [{item.shown_default}]".replace("%", "%%")
        facts: dict[str, Any] = {"dest": item.key, "help": text}
        if item.type is bool:
            facts["action"] = "store_true"
        elif item.choices:
            facts["choices"] = item.choices
        else:
            facts |= {"type": item.type, "metavar": {int: "N", float: "X"}.get(item.type, "TEXT")}
        parser.add_argument(item.flag, **facts)
