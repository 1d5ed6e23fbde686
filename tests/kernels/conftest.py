"""The process that interprets Triton kernels."""

import pytest
from interpreter import interpret
from workers import Workers


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    """On a GPU too every test takes the default tiles, and no file of the user's is read or written."""
    from fairseq_tutel.kernels import autotune

    monkeypatch.setattr(autotune._tuner(), "seconds", 0.0)


@pytest.fixture(scope="session")
def interpreter():
    """Return Workers of one process with TRITON_INTERPRET=1."""
    workers = Workers(1, interpret)
    yield workers
    workers.close()
