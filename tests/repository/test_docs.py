"""The pages' lists of flags and names are those of the code, and what they name exists."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fairseq import options

ROOT = Path(__file__).resolve().parents[2]


def _make_tables():
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs" / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", "docs/flags.md"])
def test_the_lists_are_up_to_date_and_their_lines_are_short(name):
    text = (ROOT / name).read_text()
    assert _make_tables().filled_in(ROOT / name) == text
    assert max(map(len, text.splitlines())) <= 160


def test_every_flag_and_file_that_the_pages_name_exists():
    parser = options.get_training_parser()
    known = {flag for action in parser._actions for flag in action.option_strings}
    known |= {option.flag for option in _make_tables().all_options()}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for flag in set(re.findall(r"(?<![\w-])--(?:no-)?moe-[a-z0-9-]+", path.read_text())):
            assert flag.rstrip("-") in known, f"{path.name} names {flag}"
        for link in re.findall(r"\]\(((?!http)[^)#]+)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[bce]*/*.md")]


def _anchors(page):
    """Return the anchors that a page's headings get on GitHub."""
    found = []
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for title in re.findall(r"^#+ (.*)$", text, re.M):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_anchor_within_the_repository_resolves(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"", text)
    for link in {a or b for a, b in links}:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in _anchors(target), f"{page.name} links to {link}"


def test_the_ten_line_example_runs(capsys):
    text = (ROOT / "README.md").read_text()
    *_, example = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(example.strip().splitlines()) <= 10
    exec(example, {})
    assert "torch.Size" in capsys.readouterr().out


def test_every_yes_of_the_routing_table_is_shown_by_a_test_that_exists():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "routing.md").read_text().splitlines()
        if line.startswith("| ") and line.count("|") == 14
    ]
    header, rows = rows[0], [row for row in rows[1:] if not set(row[0]) <= set("-")]
    assert header[-2:] == ["here", "shown by"] and len(rows) > 30
    for row in rows:
        shown = re.findall(r"`(tests/[^`]+)`", row[-1])
        assert bool(shown) == (row[-2] == "Y"), row[0]
        for test in shown:
            path, name = test.split("::")
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{row[0]}: {test}"


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site", ".", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "docs" / "site" / "api.html").read_text()
    assert "experts per token, from 1 to the number of experts" in page
