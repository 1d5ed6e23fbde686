"""`convert`: no kind of it runs code that a file brings, and all that take ours read shards."""

import os

import pytest
import torch
from converting import convert, refusal
from moe_files import E, save


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


FROM_OURS = {
    "to-tutel": ("--ranks", E),
    "to-meta": ("--ranks", E),
    "merge": ("--moe-expert-count", 2),
    "prune": ("--drop", 0),
    "dense": ("--experts", 0),
    "full": (),
    "sharded": (),
}


@pytest.mark.parametrize("kind", FROM_OURS)
def test_convert_reads_a_sharded_checkpoint_as_it_reads_one_file(kind, tmp_path):
    """Of the same bits, files, and what is printed but their names."""
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "whole.pt")
    shards = ("--input", tmp_path / "in" / "whole.pt", "--output", tmp_path / "in" / "shards.pt")
    convert("sharded", *shards)
    made = {}
    for name in ("whole", "shards"):
        (tmp_path / name).mkdir()
        words = ("--input", tmp_path / "in" / f"{name}.pt", "--output", tmp_path / name / "out.pt")
        printed = convert(kind, *words, *FROM_OURS[kind]).replace(f"/{name}/", "/")
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        assert files
        content = [
            path.read_bytes() if path.suffix == ".safetensors" else flat(torch.load(path))
            for path in files
        ]
        made[name] = printed, [path.relative_to(tmp_path / name) for path in files], content
    assert made["whole"] == made["shards"]


def flat(tree):
    """Return nested dictionaries with lists in place of tensors, which compare."""
    if isinstance(tree, dict):
        return {key: flat(value) for key, value in tree.items()}
    return tree.tolist() if torch.is_tensor(tree) else tree
