"""`convert`: no kind of it runs code that a file brings."""

import os

import pytest
import torch
from converting import refusal


class Hostile:
    """Unpickled without care, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


FILES = {"meta": "x-shared.pt", "to-meta": "x.pt", "tutel": "x0-of-1", "to-tutel": "x.pt"}


@pytest.mark.parametrize("older", [False, True], ids=["zip", "before zip"])
@pytest.mark.parametrize("kind", FILES)
def test_convert_runs_no_code_of_a_file(kind, older, tmp_path):
    state = {"model": {"decoder.version": torch.ones(1)}, "cfg": Hostile(tmp_path / "made")}
    torch.save(state, tmp_path / FILES[kind], _use_new_zipfile_serialization=not older)
    words = {
        "meta": ("--input", tmp_path / "x"),
        "to-meta": ("--input", tmp_path / "x.pt", "--ranks", 1),
        "tutel": ("--input-prefix", tmp_path / "x", "--input-size", 1),
        "to-tutel": ("--input", tmp_path / "x.pt", "--ranks", 1),
    }
    message = refusal(kind, *words[kind], "--output", tmp_path / "out")
    assert str(tmp_path / FILES[kind]) in message
    assert "which is torn or no checkpoint" in message and "mkdir" in message
    assert [path.name for path in tmp_path.iterdir()] == [FILES[kind]]
