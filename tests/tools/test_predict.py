"""predict: what it refuses before it opens a checkpoint; tests/e2e/test_vision.py predicts."""

import pytest
from tool_in_process import refusal_of


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
