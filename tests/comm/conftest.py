"""Ranks that live as long as the test run, one set per world size."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Return a function from a world size to its Ranks."""
    started: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        return started.setdefault(world_size, Ranks(world_size))

    yield of
    for each in started.values():
        each.close()
