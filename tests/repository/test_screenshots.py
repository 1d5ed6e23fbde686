"""The pages of the site and of the tools in a real browser, and the picture of the README."""

import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import browser
import make_report_picture
import screenshots
from fairseq_tutel.tools.report.page import draw

ROOT = Path(__file__).resolve().parents[2]
needs_chromium = pytest.mark.skipif(browser.chromium() is None, reason="not run: needs Chromium")
GOOD = """<!doctype html><html><head><style>:root {{ color-scheme: light dark; }}</style></head>
<body><p>Text.</p>{}</body></html>"""
WIDE = "<div style='width: 700px'>wide</div>"


@pytest.fixture(scope="module")
def chrome():
    with browser.Browser(browser.chromium()) as running:
        yield running


def check_all(chrome, file, folder):
    """Take the four pictures of a page; return its problems, all with the picture's name."""
    return [
        f"{path.stem}: {problem}"
        for path, problems in screenshots.taken(chrome, file, folder, file.stem)
        for problem in problems
    ]


def test_the_picture_of_the_report_is_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = make_report_picture.report()
    assert make_report_picture.is_current(make_report_picture.PICTURE, page), (
        "docs/report.png is out of date; run python docs/make_report_picture.py"
    )
    first = make_report_picture.fingerprint(page)
    assert make_report_picture.fingerprint(page.replace("Training report", "Report")) != first
    assert make_report_picture.fingerprint(page.replace("--ink: #1d2329", "--ink: #000000")) != first


@pytest.mark.long
@needs_chromium
@pytest.mark.parametrize(
    "content, problem",
    [
        ("", None),
        (f"<div style='overflow-x: auto'>{WIDE}</div>", None),
        (WIDE, 'narrow-light: the page is wider than 400 pixels, because of <div class="">'),
        ("<script>console.error('no data')</script>", "wide-light: the console has the error: no data"),
        ("<script>undefined.x</script>", "wide-dark: the console has the error: TypeError"),
        ("<style>p { opacity: 0 }</style>", "wide-light: the page is blank"),
        ("<style>:root { background: #fff }</style>", "wide-dark: the background has the brightness 255"),
        ("<img src='none.png' alt='a cat'>", "wide-light: pictures are missing: a cat"),
    ],
)
def test_a_problem_of_a_page_is_found(chrome, tmp_path, content, problem):
    file = tmp_path / "page.html"
    file.write_text(GOOD.format(content))
    problems = check_all(chrome, file, tmp_path)
    if problem is None:
        assert problems == []
        with Image.open(tmp_path / "page-narrow-dark.png") as picture:
            assert picture.width == 400
    else:
        assert any(found.startswith(f"page-{problem}") for found in problems), problems


@pytest.mark.long
@needs_chromium
def test_the_report_has_no_problem_and_its_charts_are_dark_in_dark_mode(chrome, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "report.html"
    file.write_text(make_report_picture.report())
    assert check_all(chrome, file, tmp_path) == []
    for dark in (False, True):
        page = chrome.page(1280, dark=dark)
        page.open(file.as_uri())
        box = page.value("(r => [r.x, r.y, r.right, r.bottom])(document.images[0].getBoundingClientRect())")
        chart = Image.open(io.BytesIO(page.picture())).convert("L").crop([round(side) for side in box])
        levels = chart.histogram()
        middle = next(i for i in range(256) if sum(levels[: i + 1]) > sum(levels) / 2)
        assert (middle < 60) if dark else (middle > 230)
        darkest, lightest = chart.getextrema()
        assert (lightest > 200) if dark else (darkest < 60)  # the text


@pytest.mark.long
@needs_chromium
def test_a_followed_report_reloads_and_keeps_its_scroll_position(chrome, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = make_report_picture.RUNS
    page, _ = draw([*runs], [*runs.values()])
    file = tmp_path / "report.html"
    file.write_text(page(0.5))
    opened = chrome.page(1280)
    opened.open(file.as_uri())
    opened.value("window.old = true, window.scrollTo(0, 700)")
    opened.wait_until("!window.old && document.readyState === 'complete' && scrollY === 700")
    file.write_text(page(None))
    opened.value("window.old = true")
    opened.wait_until("!window.old && document.readyState === 'complete' && scrollY === 700")
    opened.value("window.old = true")
    assert opened.value("new Promise(r => setTimeout(() => r(window.old), 1500))")


@pytest.mark.long
@needs_chromium
def test_the_picture_is_drawn_by_the_command(tmp_path, monkeypatch):
    for folder in ("docs/report", "docs"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file in (ROOT / folder).iterdir():
            if file.suffix in (".py", ".json"):
                shutil.copy(file, tmp_path / folder / file.name)

    def run(*words):
        script = tmp_path / "docs" / "make_report_picture.py"
        return subprocess.run([sys.executable, script, *words], capture_output=True, text=True)

    assert run().returncode == 0
    with Image.open(tmp_path / "docs" / "report.png") as drawn:
        assert drawn.width == 960 and 300 < drawn.height <= 500
    assert run("--check").returncode == 0
    log = tmp_path / "docs" / "report" / "moe.json"
    log.write_text(log.read_text().replace('"ppl": "', '"ppl": "1', 1))
    checked = run("--check")
    assert checked.returncode == 1 and "report.png is out of date; run python" in checked.stderr


@pytest.mark.long
@needs_chromium
def test_the_site_has_no_problem(chrome, tmp_path):
    pytest.importorskip("sphinx")
    words = ["-m", "sphinx", "-q", "-c", "docs/site", ".", str(tmp_path / "site")]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    for name in ("index", "api"):
        assert check_all(chrome, tmp_path / "site" / "docs" / "site" / f"{name}.html", tmp_path) == []
