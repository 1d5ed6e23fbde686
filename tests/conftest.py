"""For every test: one thread, the same examples in every run, memory that shows, GPU tests that say so."""

import contextlib
import gc

import pytest
import torch
from poison import poison_empty
from rank_pool import Ranks

torch.set_num_threads(1)
gc.set_threshold(100_000, 50, 100)  # looking for garbage took a tenth of the time, of collection a quarter
try:
    from hypothesis import settings
except ImportError:  # as on a machine for the kernels' tests alone
    pass
else:
    # New examples in every run would let a change fail for what it did not touch.
    settings.register_profile("same", derandomize=True)
    settings.load_profile("same")
with contextlib.suppress(ImportError):
    import quick_hydra  # noqa: F401
poison_empty()


@pytest.fixture(scope="session")
def ranks():
    """Return a function from a world size to its Ranks, which live as long as the test run."""
    started: dict[tuple[int, bool], Ranks] = {}

    def of(world_size: int, on_gpus: bool = False) -> Ranks:
        key = world_size, on_gpus
        return started.setdefault(key, Ranks(*key))

    yield of
    for each in started.values():
        each.close()


def pytest_collection_finish():
    """Leave what was imported and collected out of every later look for garbage."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="not run: needs a GPU"))
