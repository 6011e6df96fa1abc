"""What every test gets: laws are checked without a time limit per example, since CI is shared, and
there on the same examples each time; at a desk each run tries others, and finds new ones. Garbage
is looked for among what a test made, since looking through all libraries took half of a job."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "nightgrid",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("nightgrid")


@pytest.fixture(scope="module", autouse=True)
def _thawed() -> Iterator[None]:
    """What a module's tests left behind can be collected after it."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """Workers collect garbage whenever a job ends: what is there before a test is kept out."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For two processes side by side: clusters one after the other, other modules each as a whole,
    so that a module's fixtures are made once."""
    for item in items:
        together = "ray" if item.get_closest_marker("ray") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(together))
