"""predict: what it refuses before it opens a checkpoint, and a full disk.

tests/e2e/test_vision.py predicts.
"""

import errno

import pytest
from tool_in_process import refusal_of

from fairseq_tutel.tools.arguments import writing


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("--num-workers", "-1"), "--num-workers is -1; give a number of at least 0."),
        (("--output", "."), "--output is .; give the name of a file"),
        ((), "a folder without checkpoint_best.pt or checkpoint_last.pt; give a checkpoint file."),
    ],
)
def test_names_that_cannot_be(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in refusal_of("predict", ".", ".", *words)


def test_a_file_is_whole_or_what_it_was(tmp_path):
    path, link = tmp_path / "a.png", tmp_path / "link.png"
    link.symlink_to(path)
    for into in (path, link):
        with writing(into) as file:
            file.write_text(into.name)
            assert file.suffix == ".png"
    sentence = r"^--json is \S*a.png, which cannot be written: full\.$"
    with pytest.raises(ValueError, match=sentence), writing(path, "--json") as file:
        file.write_text("to")
        raise OSError(errno.ENOSPC, "full")
    assert path.read_text() == "link.png"
    assert sorted(tmp_path.iterdir()) == [path, link] and link.is_symlink()
