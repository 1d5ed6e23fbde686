"""Takes pictures of HTML pages with headless Chromium, wide and narrow, light and dark, and checks them.

`make screenshots` does it for the site and for the pages of the tools. For other pages:

    python docs/screenshots.py PAGE.html … --output build/screenshots

Exit code 1: a page has a problem, such as a table that is wider than a narrow window.
"""

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from browser import Browser, Page, chromium

WIDTHS = {"wide": 1280, "narrow": 400}  # pixels
TALLEST = 6000  # maximum height of a picture in pixels
OVERFLOW = """
(() => {
  const reach = e => e.getBoundingClientRect().right + scrollX;
  const scrolls = e => e && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
  if (document.documentElement.scrollWidth <= innerWidth) return null;
  const wide = [...document.body.querySelectorAll("*")].filter(e => reach(e) > innerWidth && !scrolls(e));
  return wide.slice(0, 3).map(e => `<${e.localName} class="${e.className}">`).join(", ") || "the page";
})()
"""
MISSING = "[...document.images].filter(i => !i.naturalWidth).map(i => i.alt || i.src.slice(0, 60)).join()"


def taken(browser: Browser, file: Path, folder: Path, name: str) -> Iterator[tuple[Path, list[str]]]:
    """Take the four pictures of a page; yield each picture's file and problems.

    Args:
        browser: the running browser.
        file: the HTML file.
        folder: the folder for the pictures.
        name: the first part of the pictures' names.
    """
    for width_name, width in WIDTHS.items():
        for dark in (False, True):
            page = browser.page(width, dark=dark)
            page.open(file.absolute().as_uri())
            picture = page.picture(TALLEST)
            path = folder / f"{name}-{width_name}-{_mode(dark)}.png"
            path.write_bytes(picture)
            yield path, problems_of(page, picture, dark)


def problems_of(page: Page, picture: bytes, dark: bool) -> list[str]:
    """Return one sentence for each problem of an open page and its picture."""
    problems = [f"the console has the error: {error}" for error in page.errors()]
    if wide := page.value(OVERFLOW):
        problems.append(f"the page is wider than {page.width} pixels, because of {wide}")
    if missing := page.value(MISSING):
        problems.append(f"pictures are missing: {missing}")
    gray = Image.open(io.BytesIO(picture)).convert("L")
    darkest, lightest = gray.getextrema()
    if lightest - darkest < 100:
        problems.append("the page is blank, or its text is hard to see")
    corner = gray.getpixel((0, gray.height - 1))
    if (corner < 128) != dark:
        problems.append(f"the background has the brightness {corner} of 255 in {_mode(dark)} mode")
    return problems


def _mode(dark: bool) -> str:
    return "dark" if dark else "light"


def main(words: Sequence[str] | None = None) -> None:
    """Take the pictures, and print their files and problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE.html", help="an HTML file")
    parser.add_argument("--output", type=Path, default=Path("build/screenshots"), metavar="FOLDER")
    arguments = parser.parse_args(words)
    program = chromium()
    if program is None:
        sys.exit("error: Chromium is not installed; install it, for example with apt-get install chromium.")
    arguments.output.mkdir(parents=True, exist_ok=True)
    found = 0
    with Browser(program) as browser:
        for file in arguments.pages:
            for path, problems in taken(browser, file, arguments.output, file.stem):
                print(path, *(f"  {problem}" for problem in problems), sep="\n", flush=True)
                found += len(problems)
    if found:
        sys.exit(f"error: the pages have {found} problems; see the lines above.")


if __name__ == "__main__":
    main()
