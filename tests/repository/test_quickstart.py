"""examples/quickstart.sh: bad input ends with one sentence, and leaves everything as it was."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart.sh"
FILES = {
    "a.de": b"eins\nzwei\n",
    "b.en": b"one\ntwo\n",
    "b.de": b"one\ntwo\n",
    "long.en": b"one\ntwo\nthree",
    "nul.en": b"one\0",
    "empty.en": b"",
    "latin.en": "f\u00fcnf\nsechs\n".encode("latin-1"),
    "plain": b"one\ntwo\n",
    "full/report.html": b"older",
}


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("a.de", "give SOURCE and TARGET, such as my.de my.en, and perhaps OUT; or nothing."),
        ("a.de b.en out more", "give SOURCE and TARGET, such as my.de my.en, and perhaps OUT; or nothing."),
        ("--upcyle a.de b.en", "--upcyle is no option; give --upcycle, --overwrite or none."),
        ("a.de b.en out --upcyle", "--upcyle is no option; give --upcycle, --overwrite or none."),
        ("a.de b.en -v", "-v is no option; give --upcycle, --overwrite or none."),
        ("a.de none.en out", "none.en does not exist; give a text file."),
        ("a.de empty.en out", "empty.en is empty; give a text file with one sentence per line."),
        ("a.de plain out", "plain has no suffix; give it that of its language, such as .de."),
        ("a.de latin.en out", "latin.en is not UTF-8; convert it with iconv."),
        ("a.de b.de out", "both files end with .de; give each the suffix of its language."),
        ("a.de long.en out", "a.de has 2 lines, but long.en has 3; give translations line by line."),
        ("a.de nul.en out", "a.de has 2 lines, but nul.en has 1; give translations line by line."),
        (
            "a.de b.en full",
            "OUT is full, which has other files or another run; give another folder, or add --overwrite.",
        ),
        ("a.de b.en plain", "OUT is plain, which is not a folder; give another name."),
        (
            "a.de b.en plain/out",
            "OUT is plain/out, but plain is not a folder that can be written to; give another name.",
        ),
        (
            "a.de b.en . --overwrite",
            "a.de is in OUT, ., whose files are replaced; give another folder as OUT.",
        ),
        ("UPDATES=0 a.de b.en out", "UPDATES is 0; give a number of at least 1."),
        ("VOCAB=many a.de b.en out", "VOCAB is many; give a number of at least 1."),
    ],
)
def test_bad_input_ends_with_one_sentence(words, sentence, tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    settings = [word for word in words.split() if "=" in word]
    command = ["env", *settings, SCRIPT, *(word for word in words.split() if "=" not in word)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {sentence}\n")
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == FILES.keys()
    assert not (tmp_path / "out").exists()


def test_too_few_sentences_are_refused_before_anything_is_written(tmp_path):
    for name in ("a.de", "b.en"):
        (tmp_path / name).write_bytes(FILES[name])
    words = ["--overwrite", "a.de", "b.en", "out"]
    done = subprocess.run([SCRIPT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr == "error: a.de and b.en have 2 pairs of sentences; give at least 100.\n"
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_smaller_than_the_alphabet_is_refused(tmp_path):
    for name in ("a.de", "b.en"):
        (tmp_path / name).write_text("abcdefghij klmnopqr\n" * 100)
    command = ["env", "VOCAB=3", SCRIPT, "a.de", "b.en", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    sentence = "error: --vocab-size is 3, fewer than the text has characters; give a larger number."
    assert done.stderr.splitlines()[-1] == sentence


def test_help_is_the_comment_of_the_script(tmp_path):
    done = subprocess.run(
        [SCRIPT, "a.de", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "examples/quickstart.sh [--upcycle]" in done.stdout
    assert "set -e" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_nllb_example_refuses_text_files_in_its_output_folder(tmp_path):
    files = [tmp_path / "data" / name for name in ("my.deu_Latn", "my.eng_Latn")]
    files[0].parent.mkdir()
    for path in files:
        path.write_bytes(b"text\n")
    command = [SCRIPT.with_name("nllb.sh"), *files, "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.endswith(
        f"{files[0]} is in OUT, ., whose files are replaced; give another folder as OUT.\n"
    )
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files
