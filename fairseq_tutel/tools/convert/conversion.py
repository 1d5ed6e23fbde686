"""Defines `Conversion`, a subcommand of the tool `convert` with its function and options."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from fairseq_tutel.checkpoint.saved import SavedModel
from fairseq_tutel.tools.arguments import add_overwrite, output_path, refuse_output

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


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A subcommand of the tool `convert`: a function and its command-line options.

    Attributes:
        convert: writes the output file; its arguments are the parsed options, the input files and the
            output path. Returns the text to print after the output path. Its docstring is the help text.
        source: help text of --input; empty if other options name the input.
        output: help text of --output, which names a folder if `is_folder`.
        inputs: returns the input files, which the output must not replace.
        one_of: mutually exclusive options; exactly one must be given.
        exclusive: groups of mutually exclusive options; at most one of a group may be given.
        late: adds options whose import is slow.
    """

    name: str
    convert: Convert
    source: str = "a checkpoint"
    output: str = "the file to write"
    is_folder: bool = False
    inputs: Callable[[argparse.Namespace], list[Path]] = lambda arguments: [Path(arguments.input)]
    options: tuple[Option, ...] = ()
    one_of: tuple[Option, ...] = ()
    exclusive: tuple[tuple[Option, ...], ...] = ()
    late: Callable[[argparse.ArgumentParser], None] | None = None

    def add_to(self, kinds: Any) -> None:
        """Add this conversion as a subcommand of the tool `convert`."""
        text = str(self.convert.__doc__)
        parser = kinds.add_parser(self.name, help=text.partition("\n")[0].rstrip("."), description=text)
        if self.source:
            parser.add_argument("--input", required=True, metavar="FILE", help=self.source)
        kind = "FOLDER" if self.is_folder else "FILE"
        parser.add_argument("--output", required=True, metavar=kind, help=self.output)
        add_overwrite(parser)
        groups = [(parser, self.options)]
        if self.one_of:
            groups.append((parser.add_mutually_exclusive_group(required=True), self.one_of))
        groups += [(parser.add_mutually_exclusive_group(), options) for options in self.exclusive]
        for group, options in groups:
            for flag, keywords in options:
                group.add_argument(flag, **keywords)
        parser.late = self.late
        parser.set_defaults(run=self.run)

    def run(self, arguments: argparse.Namespace) -> None:
        """Check the output path, convert the checkpoint, and print the output path and a summary."""
        inputs = self.inputs(arguments)
        if self.is_folder:
            output = Path(arguments.output)
            if not output.parent.is_dir() or (output.exists() and not output.is_dir()):
                raise ValueError(f"--output is {output}; give a folder whose parent folder exists.")
        else:
            output = output_path(arguments.output)
            refuse_output(output, inputs, arguments.overwrite)
        print(f"wrote {output}{self.convert(arguments, inputs, output)}")


def one_file(make: Callable[[argparse.Namespace, list[Path]], tuple[SavedModel, str]]) -> Convert:
    """Decorate a function that returns a checkpoint, so that it writes the checkpoint to a file."""

    @wraps(make)
    def convert(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
        saved, text = make(arguments, inputs)
        saved.write(output)
        return text

    return convert
