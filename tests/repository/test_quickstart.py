"""examples/quickstart.sh: bad input ends with one sentence, and no file is changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart.sh"
# The script uses .venv of the checkout if it exists, and otherwise the programs in PATH.
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
FILES = {
    "a.de": b"eins\nzwei\n",
    "b.en": b"one\ntwo\n",
    "b.de": b"one\ntwo\n",
    "long.en": b"one\ntwo\nthree",
    "empty.en": b"",
    "latin.en": "f\u00fcnf\nsechs\n".encode("latin-1"),
    "plain": b"one\ntwo\n",
    "full/report.html": b"older",
}


def start(folder, words, script=SCRIPT):
    settings = {name: value for name, _, value in (word.partition("=") for word in words if "=" in word)}
    command = [script, *(word for word in words if "=" not in word)]
    environment = ENVIRONMENT | settings
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "words, values",
    [
        ("a.de", ["SOURCE", "TARGET"]),
        ("--upcyle a.de b.en", ["--upcyle", "--upcycle"]),
        ("a.de none.en out", ["none.en"]),
        ("a.de empty.en out", ["empty.en"]),
        ("a.de plain out", ["plain", "suffix"]),
        ("a.de latin.en out", ["latin.en", "UTF-8"]),
        ("a.de b.de out", [".de"]),
        ("a.de long.en out", ["2 lines", "3"]),
        ("a.de b.en full", ["OUT is full", "--overwrite"]),
        ("a.de b.en plain", ["OUT is plain"]),
        ("a.de b.en plain/out", ["OUT is plain/out"]),
        ("a.de b.en . --overwrite", ["a.de is in OUT"]),
        ("UPDATES=0 a.de b.en out", ["UPDATES is 0"]),
        ("VOCAB=many a.de b.en out", ["VOCAB is many"]),
    ],
)
def test_bad_input_ends_with_one_sentence_and_changes_nothing(words, values, tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    done = start(tmp_path, words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert all(value in done.stderr for value in values)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == FILES.keys()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, words, value",
    [("one\n" * 2, [], "2 pairs"), ("abcdefghij klmnopqr\n" * 100, ["VOCAB=3"], "is 3")],
)
def test_text_that_cannot_be_cut_into_pieces_ends_with_one_sentence(text, words, value, tmp_path):
    for name in ("a.de", "b.en"):
        (tmp_path / name).write_text(text)
    done = start(tmp_path, [*words, "a.de", "b.en", "out"])
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("error: ") and value in done.stderr.splitlines()[-1]


def test_help_prints_the_usage_and_writes_nothing(tmp_path):
    done = start(tmp_path, ["a.de", "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "examples/quickstart.sh [--upcycle]" in done.stdout and "set -e" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_nllb_example_refuses_text_files_in_its_output_folder(tmp_path):
    files = [tmp_path / "data" / name for name in ("my.deu_Latn", "my.eng_Latn")]
    files[0].parent.mkdir()
    for path in files:
        path.write_bytes(b"text\n")
    done = start(tmp_path, [*map(str, files), "."], SCRIPT.with_name("nllb.sh"))
    assert done.returncode != 0 and f"{files[0]} is in OUT" in done.stderr
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files
