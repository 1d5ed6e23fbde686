"""For every test: one thread, uninitialised memory that shows, and GPU tests that say "not run"."""

import pytest
import torch
from poison import poison_empty

torch.set_num_threads(1)
poison_empty()


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="not run: needs a GPU"))
