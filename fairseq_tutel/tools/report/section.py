"""What a report is made of: sections with pictures."""

import base64
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Picture:
    """An SVG picture, its caption, and what it shows in words for who can not see it."""

    title: str
    text: str
    alt: str
    svg: str

    @property
    def address(self) -> str:
        """The picture as an address that holds it, so that the page needs no other file."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode("ascii")


@dataclass
class Section:
    """A part of the page; `groups` holds its pictures by the heading above them, "" for none."""

    name: str
    title: str
    text: str
    groups: dict[str, list[Picture]] = field(default_factory=dict)
