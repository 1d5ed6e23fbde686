"""The wrappers are installed once; an interrupted copy leaves the old file unchanged."""

import os

import pytest
from fairseq.file_io import PathManager

from fairseq_tutel import plugin
from fairseq_tutel.plugin.registration import wrapped

plugin.register()


def test_all_five_wrappers_are_installed_once():
    names = [f"{owner.__name__.split('.')[-1]}.{name}" for owner, name, _ in wrapped.WRAPPED]
    assert len(names) == 5 and all(f"{name}`: " in wrapped.__doc__ for name in names)
    for owner, name, _ in wrapped.WRAPPED:
        assert not hasattr(getattr(owner, name).__wrapped__, "__wrapped__")


def test_a_copy_replaces_its_destination_at_once(tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    a.write_bytes(b"new")
    b.write_bytes(b"old")
    assert PathManager.copy(str(a), str(b), overwrite=True)
    assert b.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]


def test_a_copy_replaces_the_target_of_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    a, b, there = tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "disk" / "b.pt"
    a.write_bytes(b"new")
    there.write_bytes(b"old")
    b.symlink_to(there)
    assert PathManager.copy(str(a), str(b), overwrite=True)
    assert b.is_symlink() and there.read_bytes() == b"new"
    assert os.listdir(tmp_path / "disk") == ["b.pt"]


def test_a_failed_copy_leaves_the_destination_as_it_was(tmp_path):
    b = tmp_path / "b.pt"
    b.write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        PathManager.copy(str(tmp_path / "missing.pt"), str(b), overwrite=True)
    assert b.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["b.pt"]
