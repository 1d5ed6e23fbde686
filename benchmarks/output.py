"""Writes the results of a benchmark to a file after every configuration, and prints tables.

A row is the result of one variant in one configuration. `status` is ok, skipped (with the reason), failed
(with the exception) or wrong (the numbers differ from the reference, so the row has no times).
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# Possible columns of a table, in this order; a column is omitted if no row has it.
COLUMNS = (
    "mode",
    "variant",
    "seconds",
    "ratio",
    "rate",
    "read",
    "kept",
    "formula",
    "peak",
    "error",
    "note",
)
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


class BadOption(ValueError):  # noqa: N818 - it is the user's, and ends the command with one sentence
    """An invalid option; the message is one sentence with the option, its value and the fix."""


@dataclass
class Report:
    """All results of one run of a benchmark.

    Attributes:
        benchmark: name of the benchmark.
        base: name of the variant by whose time other times are divided.
        machine: environment from `machine.facts`.
        options: options of the run.
        path: path of the --json file, or None.
        configurations: properties of each configuration, by name.
        rows: rows in the order in which they were measured.
    """

    benchmark: str
    base: str
    machine: dict[str, Any]
    options: dict[str, Any]
    path: Path | None = None
    configurations: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, configuration: str, facts: dict[str, Any], rows: Iterable[Row]) -> None:
        """Add the results of one configuration, rewrite the file and print the rows."""
        self.configurations[configuration] = facts
        new = [{"configuration": configuration, **row} for row in rows]
        known = {_why_not(row) for row in self.rows}
        self.rows += new
        self._write(complete=False)
        print(f"\n{title_of(new[0])}\n\n{table(new)}")
        # Print each reason only once; usually a package is not installed.
        for reason in dict.fromkeys(map(_why_not, new)):
            if reason is not None and reason not in known:
                print(reason)
        sys.stdout.flush()

    def finish(self) -> None:
        """Mark the file as complete."""
        self._write(complete=True)

    def _write(self, complete: bool) -> None:
        if self.path is None:
            return
        found = {
            "benchmark": self.benchmark,
            "base": self.base,
            "complete": complete,
            "machine": self.machine,
            "options": self.options,
            "configurations": self.configurations,
            "rows": self.rows,
        }
        # An interrupted run must leave the complete old file or the complete new file.
        half = self.path.with_name(self.path.name + ".part")
        half.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(half, self.path)


def refuse_unwritable(path: Path | None, flag: str) -> None:
    """Raise BadOption if the file cannot be written, so that a measurement does not fail at its end."""
    try:
        if path is not None:
            path.open("a").close()
    except OSError as error:
        raise BadOption(
            f"{flag} is {path}, which cannot be written ({error.strerror}); give another path."
        ) from error


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table, or as lines of JSON if tabulate is not installed."""
    try:
        from tabulate import tabulate
    except ImportError:  # some GPU machines have only torch
        return "\n".join(map(json.dumps, rows))
    shown = [_shown(row) for row in rows if row["status"] != "skipped"]
    names = [name for name in COLUMNS if any(row.get(name) for row in shown)]
    cells = [[row.get(name, "") for name in names] for row in shown]
    return tabulate(cells, headers=names, tablefmt="github", disable_numparse=True)


def _shown(row: Row) -> dict[str, str]:
    shown = {"mode": row.get("mode", ""), "variant": row["variant"]}
    if row["status"] != "ok":
        return {**shown, "note": f"{row['status']}: {row['reason']}"}
    if "seconds" in row:
        shown["seconds"] = f"{row['seconds']:.4g}"
    if "ratio" in row:
        shown["ratio"] = f"{row['ratio']:.3f} ({row['ratio_p20']:.3f}..{row['ratio_p80']:.3f})"
    if "rate" in row:
        shown["rate"] = with_prefix(row["rate"], row["rate_unit"])
    for name in ("read", "kept", "formula", "peak"):
        if f"{name}_bytes" in row:
            shown[name] = f"{row[f'{name}_bytes'] / 2**20:.1f} MiB"
    if row.get("error") is not None:
        shown["error"] = f"{row['error']:.1e}"
    return {**shown, "note": row.get("note", "")}


def with_prefix(number: float, unit: str) -> str:
    """Return a rate with a unit prefix, such as 3.2 GFLOP/s."""
    for size, prefix in PREFIXES:
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def _why_not(row: Row) -> str | None:
    return f"not run: {row['variant']}: {row['reason']}" if row["status"] == "skipped" else None


def title_of(row: Row) -> str:
    """Return the title of the table that a row belongs to: configuration and threads."""
    number = row.get("threads")
    threads = "" if number is None else f", {number} thread{'s' if number > 1 else ''}"
    return f"{row['configuration']}{threads}"
