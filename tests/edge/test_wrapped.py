"""The wrappers: each refuses a fairseq it was not written for, and copies are whole or absent."""

import os

import pytest
from fairseq.file_io import PathManager

from fairseq_tutel import plugin, wrapped

plugin.register()


def test_a_function_of_another_signature_is_refused():
    def newer(self, everything):
        pass

    with pytest.raises(ImportError, match="takes \\('self', 'everything'\\), expected"):
        wrapped._guard(newer, ("self",))


def test_all_five_wrappers_are_installed_once():
    from fairseq import checkpoint_utils
    from fairseq.distributed import utils
    from fairseq.optim import FP16Optimizer
    from fairseq.trainer import Trainer

    wrapped_functions = (
        Trainer.consolidate_optimizer, checkpoint_utils.load_checkpoint_to_cpu, PathManager.copy,
        utils.call_main, FP16Optimizer.build_optimizer,
    )  # fmt: skip
    for function in wrapped_functions:
        assert not hasattr(function.__wrapped__, "__wrapped__")


def test_a_copy_replaces_its_destination_at_once(tmp_path):
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    a.write_bytes(b"new")
    b.write_bytes(b"old")
    assert PathManager.copy(str(a), str(b), overwrite=True)
    assert b.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt"]


def test_a_failed_copy_leaves_the_destination_as_it_was(tmp_path):
    b = tmp_path / "b.pt"
    b.write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        PathManager.copy(str(tmp_path / "missing.pt"), str(b), overwrite=True)
    assert b.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["b.pt"]


def test_another_fairseq_version_is_refused(monkeypatch):
    import fairseq

    monkeypatch.setattr(fairseq, "__version__", "1.0.0a0")
    with pytest.raises(ImportError, match=r"version 1\.0\.0a0; fairseq_tutel needs 0\.12"):
        plugin._check_fairseq()
