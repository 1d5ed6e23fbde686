"""predict: what it refuses before it opens a checkpoint, and a full disk.

tests/e2e/test_vision.py predicts.
"""

import errno

import pytest
from tool_in_process import refusal_of

from fairseq_tutel.tools.arguments import writing
from fairseq_tutel.tools.predict import Answer, _spread


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("--grid", "answers.xyz"), "--grid is answers.xyz; give a name that ends with .png"),
        (("--output", "a.png", "--grid", "a.png"), "--grid is a.png; give a name that ends"),
        ((), "CHECKPOINT is ., a folder; give a file of it, such as checkpoint_best.pt."),
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
    full, sentence = (
        OSError(errno.ENOSPC, "full"),
        r"^--grid is \S*a.png, which cannot be written: full\.$",
    )
    with pytest.raises(ValueError, match=sentence), writing(path, "--grid") as file:
        file.write_text("to")
        raise full
    assert path.read_text() == "link.png"
    assert sorted(tmp_path.iterdir()) == [path, link] and link.is_symlink()


def test_the_grid_takes_classes_in_turn():
    answers = [Answer(i, target, [(0, 1.0)]) for i, target in enumerate([0, 0, 0, 1, 1, 2])]
    assert [answer.image for answer in _spread(answers)] == [0, 3, 5, 1, 4, 2]
