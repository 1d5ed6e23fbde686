"""Tests that docs, package and tests contain no rejected phrase."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHER_PAGES = ("README.md", "CONTRIBUTING.md", "configs/README.md")
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in OTHER_PAGES)])
GLOSSARY = ROOT / "docs" / "glossary.md"
# In some Python versions, pathlib does not follow the symbolic link to kernels/.
MODULES = sorted(
    {*(ROOT / "fairseq_tutel").rglob("*.py"), *(ROOT / "fairseq_tutel" / "kernels").glob("*.py")}
)
MOST_TERMS = 45

# Patterns of rejected phrases, and plain words to use instead.
IN_PACKAGE = {
    r"hands? over": "passes",
    r"takes part": "runs without tokens",
    r"serves the others": "runs without tokens",
    r"whole or nothing": "atomic",
    r"narrow wires?": "transfer dtype",
    r"twins of a rank": "EP replicas",
    r"served or lied to": "fault injection",
    r"(?:and|of) its mood": "not comparable between machines",
    r"tells nobody": "is not logged",
    r"says it once": "logs it once",
    r"those begun before": "queued jobs",
}
IN_PAGES = {
    **IN_PACKAGE,
    r"stock's": "fairseq's",
    r"twins?": "MoE variant",
    r"trainings": "training runs",
    r"torn": "corrupt, or truncated",
    r"beside": "in addition to, or next to",
    r"roll calls?": "health check",
    r"trips?": "all-to-all, or exchange",
    r"slabs?": "row chunk",
    r"wires?": "transfer dtype",
    r"as ever": "as before",
    r"begins? anew": "starts from scratch",
    r"go(?:es)? on": "continues, or resumes",
    r"(?:is|are|was|were|be) told": "gets, or logs",
    r"tells?": "logs, returns, or prints",
    r"of one's own": "custom",
    r"by (?:itself|themselves)": "alone, or separately",
    r"nobody|somebody|everybody": "name the program or rank",
    r"who (?:keeps?|learns?|leaves|serves?|drops?)": "which assignment, member, expert or rank",
    r"keeps? a place|places of an expert": "slot",
    r"what follows|what comes of it|what it comes to": "name the thing",
    r"foretells?": "predicts",
    r"numbers of the machine": "hardware profile",
    r"takes? it for a wish": "treats it as a request",
    r"what is done in any case": "name the thing",
}
IN_TESTS = {
    r"told": "gets, or logs",
    r"mended": "corrected, or repaired",
    r"twins?": "MoE variant",
    r"stock's": "fairseq's",
    r"stock(?! (?:model|task|layer|class|arch|optim|criterion|fairseq))": "fairseq",
}


def prose(page: Path) -> str:
    """Return the text of a page without code, quoted messages, generated tables and link targets."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", page.read_text(), flags=re.S)
    text = re.sub(r"^<!-- (?!end).*?^<!-- end -->", " ", text, flags=re.S | re.M)
    text = re.sub(r"^> .*$", " ", text, flags=re.M)
    return " ".join(text.split())


def found(phrases: dict[str, str], text: str) -> list[str]:
    return [
        f"{match.group(0)!r}: use {better}"
        for phrase, better in phrases.items()
        for match in re.finditer(rf"\b(?:{phrase})\b", text, re.I)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documentation_pages_have_no_rejected_phrase(page):
    assert not found(IN_PAGES, prose(page))


def test_the_package_has_no_rejected_phrase():
    hits = [(path.name, hit) for path in MODULES for hit in found(IN_PACKAGE, path.read_text())]
    assert not hits


def text_of(test: Path) -> str:
    """Return all comments, docstrings and test names of a test file."""
    tokens = tokenize.generate_tokens(io.StringIO(test.read_text()).readline)
    return "\n".join(
        token.string.replace("_", " ") if token.type == tokenize.NAME else token.string
        for token in tokens
        if token.type == tokenize.COMMENT
        or (token.type == tokenize.NAME and token.string.startswith("test_"))
        or (token.type == tokenize.STRING and token.string.startswith('"""'))
    )


def test_tests_have_no_rejected_phrase():
    tests = [path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__).resolve()]
    hits = {str(path.relative_to(ROOT)): found(IN_TESTS, text_of(path)) for path in tests}
    assert not {name: hit for name, hit in hits.items() if hit}


def test_the_search_finds_rejected_phrases():
    assert found(IN_PAGES, "Its twins go there.") == ["'twins': use MoE variant"]
    assert not found(IN_PAGES, "an ongoing strip")


def test_every_glossary_term_is_used_and_defined_in_one_sentence():
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", GLOSSARY.read_text(), re.M)
    terms = {term: meaning for term, meaning in rows if term not in ("term", "---")}
    assert 0 < len(terms) <= MOST_TERMS
    assert list(terms) == sorted(terms, key=str.lower)
    for term, meaning in terms.items():
        assert re.fullmatch(r"[A-Z][^.]*\.", meaning), f"{term} is not defined in one sentence"
    texts = [prose(page) for page in PAGES if page != GLOSSARY] + [p.read_text() for p in MODULES]
    used = "\n".join(texts).lower()
    assert [term for term in terms if term.lower() not in used] == []
