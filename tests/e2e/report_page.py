"""Parses an HTML page of `report`."""

import base64
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "img", "br", "hr", "link", "input"}
HREF = "{http://www.w3.org/1999/xlink}href"


class Page(HTMLParser):
    """A parsed page; the parser fails at the first tag that is not closed correctly."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.images, self.cells = [], [], [], []
        self.addresses, self.texts = [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.open.append((tag, attributes))
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.addresses += [attributes[name] for name in ("src", "href") if name in attributes]
        if tag == "img":
            section = next(a["id"] for t, a in reversed(self.open) if t == "section")
            self.images.append((section, attributes["alt"], picture(attributes["src"])))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if tags:
            self.texts.setdefault(tags[-1], []).append(data.strip())
        if "tbody" in tags and tags[-1] in ("th", "td"):
            self.cells.append(data)

    def pictures(self, section):
        """Return (alternative text, SVG) of every picture of a section."""
        return [(alt, svg) for name, alt, svg in self.images if name == section]


def picture(address):
    kind, data = address.split(",", 1)
    assert kind == "data:image/svg+xml;base64"
    return ElementTree.fromstring(base64.b64decode(data))


def words_of(svg):
    return {" ".join(text.itertext()).strip() for text in svg.iter("{http://www.w3.org/2000/svg}text")}


def page_in(file):
    return Page(file.read_text(encoding="utf-8"))
