"""Draws docs/report.png: summary, loss and loads in the report of the demo's two runs, from docs/report.

`python docs/make_report_picture.py` needs Chromium. With --check it only reports, without Chromium, whether
the picture is up to date. `make demo` writes new logs: demo/train-dense.json and demo/train-moe.json.
"""

import argparse
import base64
import hashlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from browser import Browser, chromium
from fairseq_tutel.tools.report.page import draw

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "report.png"
RUNS = {name: Path("docs", "report", f"{name}.json") for name in ("dense", "moe")}
WIDTH = 960  # pixels
KEY = "report"  # key of the fingerprint in the picture's metadata
# The rest of the report is not in the picture.
LEFT_OUT = r'<header>.*?</header>|<footer>.*?</footer>|<section id="(?!loss"|load").*?</section>'
STYLE = """
  :root { font-size: 13px; } body { padding: .75rem; }
  main { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem 1.5rem; }
  #load strong::before { content: "load, "; } .wide { grid-column: 1 / -1; } table, .pictures { margin: 0; }
  caption, h2, h3, p, #loss figure:nth-of-type(n + 2), #loss .pictures:nth-of-type(n + 2),
  #load .pictures { display: none; }
  #load h3:nth-of-type(1) + .pictures { display: grid; grid-template-columns: 1fr 1fr; gap: .5rem 1rem; }
"""


def report() -> str:
    """Return the page that the picture shows: the parts of the report in a smaller layout."""
    page = draw([*RUNS], [*RUNS.values()])
    return re.sub(LEFT_OUT, "", page, flags=re.S).replace("</style>", f"{STYLE}</style>")


def fingerprint(page: str) -> str:
    """Return a digest of a page: its text and style, and the words and colors of its charts.

    The digest ignores the coordinates in the charts, which depend on the version of matplotlib.
    """

    def words(chart: re.Match) -> str:
        svg = base64.b64decode(chart[1]).decode()
        return " ".join(re.findall(r"[^<>]+(?=</text>)|(?:fill|stroke): #\w+", svg))

    text = re.sub(r"data:image/svg\+xml;base64,([\w+/=]+)", words, page)
    return hashlib.sha256(text.encode()).hexdigest()


def is_current(picture: Path, page: str) -> bool:
    """Return whether a picture was drawn from a page with the same fingerprint."""
    with Image.open(picture) as image:
        return image.info.get(KEY) == fingerprint(page)


def draw_picture(program: str, page: str, picture: Path) -> None:
    """Write a picture of a page, with the page's fingerprint.

    Args:
        program: path of Chromium.
        page: text of the page.
        picture: the PNG file.
    """
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        file = Path(folder, "report.html")
        file.write_text(page, encoding="utf-8")
        opened = browser.page(WIDTH)
        opened.open(file.as_uri())
        height = opened.value("document.body.getBoundingClientRect().bottom")
        image = Image.open(io.BytesIO(opened.picture(round(height))))
    info = PngInfo()
    info.add_text(KEY, fingerprint(page))
    image.convert("RGB").quantize(256).save(picture, optimize=True, pnginfo=info)


def main() -> None:
    """Draw the picture, or with --check exit with code 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if the picture is out of date"
    )
    check = parser.parse_args().check
    os.chdir(ROOT)  # the page shows the paths of the logs
    page = report()
    if check:
        if not is_current(PICTURE, page):
            sys.exit(f"{PICTURE.name} is out of date; run python {sys.argv[0]}")
        return
    program = chromium()
    if program is None:
        sys.exit("error: Chromium is not installed; install it, for example with apt-get install chromium.")
    draw_picture(program, page, PICTURE)


if __name__ == "__main__":
    main()
