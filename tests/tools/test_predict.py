"""predict: what it refuses before it opens a checkpoint, and a full disk.

tests/e2e/test_vision.py predicts.
"""

import argparse
import errno

import pytest
import torch
from terminal import terminal
from tool_in_process import refusal_of

from fairseq_tutel.tools.arguments import writing
from fairseq_tutel.tools.predict import _answers


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("--num-workers", "-1"), "--num-workers is -1; give a number of at least 0."),
        (("--output", "."), "--output is .; give the name of a file"),
        ((), "without checkpoint_best.pt or checkpoint_last.pt or model.pt; give a checkpoint file."),
    ],
)
def test_names_that_cannot_be(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sentence in refusal_of("predict", ".", ".", *words)


class Images(list):
    def collater(self, numbers):
        ids = torch.tensor(numbers)
        return {"id": ids, "target": ids % 2, "net_input": {"images": ids}}


class Classifier(torch.nn.Module):
    def forward(self, images):
        return torch.eye(3)[images % 2]

    def get_normalized_probs(self, output, log_probs):
        return output


def test_the_progress_is_shown_on_a_terminal():
    given = argparse.Namespace(cpu=True, limit=5, batch_size=2, num_workers=0)
    with terminal() as drawn:
        found = list(_answers(Classifier(), Images(range(7)), given))
        assert "classifying:   0%|" in (text := drawn()) and "0/5 [" in text
    assert [(image, target, best[0][0]) for image, target, best in found] == [
        (i, i % 2, i % 2) for i in range(5)
    ]


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
