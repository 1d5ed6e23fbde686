"""Reads the code blocks of README.md and docs/, and the commands in the blocks."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    "docs/site/api.md",
]


class Block(NamedTuple):
    """A fenced code block of a page, with the number of its first line."""

    line: int
    language: str
    text: str


def blocks(page: str, language: str) -> list[Block]:
    """Return a page's code blocks in one language, in their order."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.S | re.M)
    every = [Block(text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in found]
    return [block for block in every if block.language == language]


def commands(page: str) -> list[tuple[int, str]]:
    """Return the commands of a page's bash blocks on one line each, with the number of the block's line."""
    found = []
    for block in blocks(page, "bash"):
        lines = block.text.replace("\\\n", " ").splitlines()
        found += [(block.line, " ".join(line.split())) for line in lines if not line.startswith("#")]
    return found
