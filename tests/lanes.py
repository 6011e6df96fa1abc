"""Share the suite out among several pytest processes (``pytest -n 2``, pytest-xdist).

A test file stays in one process, so that what its tests share is made once. Files with Ray clusters
form two lanes, each of which stays in one process: one of those that start one cluster after
another, one of those that mostly share theirs; both take about equally long, and wait half of their
time, in which the other processes compute. What takes long begins first.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling


@cache
def lane(file: Path) -> str:
    """The lane of a test file that starts Ray clusters; empty for all others."""
    source = file.read_text()
    if "pytest.mark.ray" not in source:
        return ""
    many = "--emulate" in source or "ChaosCluster" in source
    return "one cluster after another" if many else "shared clusters"


@cache
def rank(file: Path) -> int:
    """The turn of a test file: those with a Ray cluster, those that are slow as a whole, those with
    a slow test, the rest."""
    source = file.read_text()
    if lane(file):
        return 0
    if re.search(r"^pytestmark = .*pytest\.mark\.slow", source, re.MULTILINE):
        return 1
    return 2 if "pytest.mark.slow" in source else 3


class Lanes(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the number of its tests says nothing of a file

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return lane(self.config.rootpath / file) or file
