"""Settings for all tests: one thread, reproducible examples, and NaN in uninitialized tensors."""

import contextlib
import gc

import pytest
import torch
from poison import poison_empty
from rank_pool import Ranks

torch.set_num_threads(1)
# With Python's default thresholds, garbage collection took a tenth of the test time.
gc.set_threshold(100_000, 50, 100)
try:
    from hypothesis import settings
except ImportError:  # tests of kernels can run without hypothesis
    pass
else:
    # hypothesis must draw the same examples in every test run.
    settings.register_profile("same", derandomize=True)
    settings.load_profile("same")
with contextlib.suppress(ImportError):
    import quick_hydra  # noqa: F401
poison_empty()


@pytest.fixture(scope="session")
def ranks():
    """Return a function that returns `world_size` processes, which all tests share."""
    started: dict[tuple[int, bool], Ranks] = {}

    def of(world_size: int, on_gpus: bool = False) -> Ranks:
        key = world_size, on_gpus
        return started.setdefault(key, Ranks(*key))

    yield of
    for each in started.values():
        each.close()


def pytest_collection_finish():
    """Exclude all imported modules and collected tests from garbage collection."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Skip tests with the mark `gpu` on a machine without a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="not run: needs a GPU"))
