"""The command; see the package."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from tabulate import tabulate

from benchmarks import static
from benchmarks.bad_option import BadOption
from benchmarks.output import refuse_unwritable
from benchmarks.static import kernels, layers, peers


def main(words: Sequence[str] | None = None) -> None:
    """Compile and trace, print the tables, and write the file of --json."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.static",
        description=(static.__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = ",".join(kernels.PROCESSORS)
    parser.add_argument("--targets", default=names, help="comma-separated names of targets")
    parser.add_argument("--only", default="", help="a part of a kernel's name; skips the layers")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(words)
    try:
        refuse_unwritable(options.json, "--json")
        chosen = _targets(options.targets)
    except BadOption as error:
        parser.error(str(error))
    compiled, others = (list(each.rows(chosen, options.only)) for each in (kernels, peers))
    print(tabulate(compiled + others, headers="keys"))
    traced = [] if options.only else list(layers.rows())
    print(tabulate([{k: v for k, v in row.items() if k != "names"} for row in traced], headers="keys"))
    if options.json:
        found = {
            "benchmark": "static", "triton": triton.__version__, "kernels": compiled, "peers": others,
            "layers": traced,
        }  # fmt: skip
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def _targets(given: str) -> list[str]:
    names: list[Any] = given.split(",")
    for name in names:
        if name not in kernels.PROCESSORS:
            raise BadOption(f"--targets has {name!r}; choose from {', '.join(kernels.PROCESSORS)}.")
    return names


if __name__ == "__main__":
    main()
