"""The picture in README.md is up to date, and a browser shows the tools' pages without problems."""

import pytest

import browser
import make_performance
import make_report_picture
import make_scaling
import screenshots

ROOT = make_report_picture.ROOT
needs_chromium = pytest.mark.skipif(browser.chromium() is None, reason="not run: needs Chromium")


@pytest.mark.parametrize("script", [make_performance, make_scaling], ids=lambda script: script.PAGE.name)
def test_the_tables_of_a_page_are_up_to_date(script):
    text = script.PAGE.read_text()
    assert script.filled_in(text) == text, f"run python docs/{script.__name__}.py"


def test_the_picture_of_the_report_is_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = make_report_picture.report()
    assert make_report_picture.is_current(make_report_picture.PICTURE, page), (
        "docs/report.png is out of date; run python docs/make_report_picture.py"
    )


@pytest.mark.long
@needs_chromium
def test_the_report_has_no_problem_in_a_browser(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "report.html"
    file.write_text(make_report_picture.report())
    wide = tmp_path / "wide.html"
    wide.write_text("<!doctype html><body><div style='width: 700px'>wide</div></body>")
    with browser.Browser(browser.chromium()) as chrome:
        taken = screenshots.taken(chrome, file, tmp_path, "report")
        assert [problem for _, problems in taken for problem in problems] == []
        taken = screenshots.taken(chrome, wide, tmp_path, "wide")
        assert any("wider than 400 pixels" in problem for _, found in taken for problem in found)
