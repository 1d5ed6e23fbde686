"""What a kind of `convert` is: an entry of a table, from which its parser is made."""

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
    """Return an option of a conversion; a whole number has the metavar N, another one X."""
    usual = {int: "N", float: "X"}.get(keywords.get("type", str))
    if metavar or usual:
        keywords["metavar"] = metavar or usual
    return flag, {"help": help, **keywords}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A kind of `convert`.

    Attributes:
        convert: writes the output of (arguments, input files, output); returns what to print after the name
            of the output. Its docstring is the help.
        source: help of --input; empty if other options name the input.
        output: help of --output, the name of a folder if `is_folder`.
        inputs: returns the input files, which are never replaced.
        one_of: options of which exactly one must be given.
        exclusive: groups of options of which at most one can be given.
        late: adds options that are slow to import.
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
        """Add the conversion to the command line."""
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
        """Check the output, convert, and print what was written."""
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
    """Return a conversion that writes the checkpoint that `make` returns."""

    @wraps(make)
    def convert(arguments: argparse.Namespace, inputs: list[Path], output: Path) -> str:
        saved, text = make(arguments, inputs)
        saved.write(output)
        return text

    return convert
