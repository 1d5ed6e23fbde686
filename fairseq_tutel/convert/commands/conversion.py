"""Defines `Conversion`, a subcommand of the tool `convert` with its function and options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_tutel.option import Option as TableOption
from fairseq_tutel.tools.arguments import refuse_output
from fairseq_tutel.tools.parser import add_input, add_options, add_output

if TYPE_CHECKING:
    from fairseq_tutel.checkpoint.saved import SavedModel

NEW_RUN = "; start a new training run from it"
# A flag with the keywords of add_argument.
Option = tuple[str, dict[str, Any]]
Convert = Callable[[argparse.Namespace, list[Path], Path], str]


def option(flag: str, help: str, metavar: str | None = None, **keywords: Any) -> Option:
    """Return a flag and its add_argument keywords; the default metavar is N for integers, X for floats."""
    usual = {int: "N", float: "X"}.get(keywords.get("type", str))
    if metavar or usual:
        keywords["metavar"] = metavar or usual
    return flag, {"help": help, **keywords}


def _one_checkpoint(arguments: argparse.Namespace) -> list[Path]:
    from fairseq_tutel.checkpoint.files import checkpoint_in

    return [checkpoint_in(Path(arguments.input), "INPUT")]


def one_folder(arguments: argparse.Namespace) -> list[Path]:
    """Return the input of a conversion that reads a folder."""
    return [Path(arguments.input)]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A subcommand of the tool `convert`: a function and its command-line options.

    A module of conversions is also imported for --help. Its functions import the modules that need torch.

    Attributes:
        convert: writes the output file; its arguments are the parsed options, the input files and the
            output path. Returns the text to print after the output path. Its docstring is the help text.
        example: the words after the subcommand's name in a correct command.
        source: help text of the input.
        key: name of the parsed input and, in upper case, of the input in the help.
        former: an older option that names the input.
        output: help text of --output, which names a folder if `is_folder`.
        inputs: returns the input files, which the output must not replace; by default one checkpoint, which
            may be in a folder such as --save-dir.
        one_of: mutually exclusive options; exactly one must be given.
        exclusive: groups of mutually exclusive options; at most one of a group may be given.
        of_model: options of a table that are saved with the model.
    """

    name: str
    convert: Convert
    example: str
    source: str = "a checkpoint"
    key: str = "input"
    former: str = "--input"
    output: str = "the checkpoint to write"
    is_folder: bool = False
    inputs: Callable[[argparse.Namespace], list[Path]] = _one_checkpoint
    options: tuple[Option, ...] = ()
    one_of: tuple[Option, ...] = ()
    exclusive: tuple[tuple[Option, ...], ...] = ()
    of_model: tuple[TableOption, ...] = ()

    def add_to(self, kinds: Any) -> None:
        """Add this conversion as a subcommand of the tool `convert`."""
        text = str(self.convert.__doc__)
        first_line = text.partition("\n")[0].rstrip(".")
        parser = kinds.add_parser(self.name, help=first_line, description=text, example=self.example)
        add_input(parser, self.source, self.key, self.former)
        add_output(parser, self.output, required=True, is_folder=self.is_folder)
        groups = [(parser, self.options)]
        if self.one_of:
            groups.append((parser.add_mutually_exclusive_group(required=True), self.one_of))
        groups += [(parser.add_mutually_exclusive_group(), options) for options in self.exclusive]
        for group, options in groups:
            for flag, keywords in options:
                group.add_argument(flag, **keywords)
        if self.of_model:
            title = "options of the experts, as for fairseq-train; they are saved with the model"
            add_options(parser.add_argument_group(title), self.of_model)
        parser.set_defaults(run=self.run)

    def run(self, arguments: argparse.Namespace) -> None:
        """Check the output path, convert the checkpoint, and print the output path and a summary."""
        inputs, output = self.inputs(arguments), arguments.output
        if not self.is_folder:
            refuse_output(output, inputs, arguments.overwrite)
        elif not output.parent.is_dir() or (output.exists() and not output.is_dir()):
            raise ValueError(f"--output is {output}; give a folder whose parent folder exists.")
        print(f"wrote {output}{self.convert(arguments, inputs, output)}")


def one_file(make: Callable[[argparse.Namespace, list[Path]], tuple[SavedModel, str]]) -> Convert:
    """Decorate a function that returns a checkpoint, so that it writes the checkpoint to a file."""

    @wraps(make)
    def convert(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
        saved, text = make(arguments, inputs)
        saved.write(output)
        return text

    return convert
