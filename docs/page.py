"""Functions for the scripts that write tables into a page: they find the tables' places and handle --check.

The table "x" is between the line `<!-- x -->` and the next line `<!-- end -->`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def filled(text: str, page: str, tables: Mapping[str, str]) -> str:
    """Return a page's text with new tables.

    Args:
        text: text of the page.
        page: name of the page, for error messages.
        tables: the new tables by name.

    Raises:
        ValueError: the page has no place, or several places, for a table.
    """
    for name, table in tables.items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, t=table: m[1] + t + "\n" + m[2], text, flags=re.S)
        if count != 1:
            raise ValueError(f"{page} has {count} places for the table {name!r}; it needs one.")
    return text


def run(path: Path, filled_in: Callable[[str], str], description: str | None) -> bool:
    """Rewrite a page. With --check, end the process with exit code 1 if a table is out of date, else 0.

    Args:
        path: path of the page.
        filled_in: function that returns the page's text with new tables.
        description: description for --help.

    Returns:
        Whether the page was rewritten; the caller then also draws the page's pictures.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a table is out of date"
    )
    check = parser.parse_args().check
    old = path.read_text()
    new = filled_in(old)
    if not check:
        path.write_text(new)
    elif new != old:
        sys.exit(f"{path.name} is out of date; run python {sys.argv[0]}")
    return not check


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Return a Markdown table without alignment; cells are not changed."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
