"""The command; see the package."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks import compile_table
from benchmarks.compile_table import build

HEADERS = ("kernel", "target", "registers", "scalar registers", "spilled", "shared bytes")


def rows(targets: Sequence[str], only: str) -> list[tuple[str, str, int, int, int, int]]:
    """Compile and return a row of HEADERS for every variant whose name has `only` in it."""
    found = []
    for target in build.TARGETS:
        name = build.name_of(target)
        for variant in build.variants(target):
            if name in targets and only in variant.name:
                f = build.figures(build.build(variant, target))
                found.append((variant.name, name, f.registers, f.scalars, f.spilled, f.shared))
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as markdown to the file of --markdown."""
    names = [build.name_of(target) for target in build.TARGETS]
    parser = argparse.ArgumentParser(description=(compile_table.__doc__ or "").split("\n")[0])
    parser.add_argument("--target", action="append", choices=names, help="default: all of them")
    parser.add_argument("--only", default="", help="a part of the kernel's name")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    table = rows(options.target or names, options.only)
    print(tabulate(table, HEADERS))
    if options.markdown is not None:
        options.markdown.write_text(tabulate(table, HEADERS, tablefmt="github") + "\n")


if __name__ == "__main__":
    main()
