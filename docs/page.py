"""What the scripts that write tables into a page have in common: places for tables, --check.

A place for the table "x" is the line `<!-- x -->`; the table ends before the next `<!-- end -->`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def filled(text: str, page: str, tables: Mapping[str, str]) -> str:
    """Return a page's text with every table in its place.

    Args:
        text: of the page.
        page: its name, for errors.
        tables: by the names of their places.

    Raises:
        ValueError: a table has no place, or several.
    """
    for name, table in tables.items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, t=table: m[1] + t + "\n" + m[2], text, flags=re.S)
        if count != 1:
            raise ValueError(f"{page} has {count} places for the table {name!r}; it needs one.")
    return text


def run(path: Path, filled_in: Callable[[str], str], description: str | None) -> bool:
    """Rewrite a page, or with --check end the process, with 1 where a table is out of date.

    Args:
        path: of the page.
        filled_in: returns its text with all tables.
        description: for --help.

    Returns:
        Whether the page was rewritten, so that its pictures are to be drawn too.
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
    """Return a table without alignment, whose cells are left as they are."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
