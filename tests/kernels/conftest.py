"""A fixture for tests that interpret Triton kernels in another process."""

import pytest
from interpreter import interpret_with_gpu
from workers import Workers


@pytest.fixture(scope="session")
def interpreter():
    """Return one worker process with TRITON_INTERPRET=1."""
    workers = Workers(1, interpret_with_gpu)
    yield workers
    workers.close()
