"""What every test gets: laws are checked without a time limit per example, since CI is shared, and
there on the same examples each time; at a desk each run tries others, and finds new ones. Garbage
is looked for among what a test made, since looking through all libraries took half of a job."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

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

# Else each of hundreds of processes that tests start would compile all of our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What tests compute is small; where cores are shared, a second thread mostly waits, at full load.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the tests' own, in which the pretrained model is made once out of its package."""
    return tmp_path_factory.mktemp("pretrained")


@pytest.fixture(scope="module", autouse=True)
def _thawed() -> Iterator[None]:
    """What a module's tests left behind can be collected after it."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _frozen() -> None:
    """Workers collect garbage whenever a job ends: what is there before a test is kept out."""
    gc.freeze()
