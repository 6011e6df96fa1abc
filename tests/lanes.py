"""Share the suite out among several pytest processes (``pytest -n 2``, pytest-xdist).

A test file stays in one process, so that what its tests share is made once. The files that start
Ray clusters stay in one process together: clusters take turns, since two at once, of a dozen
processes each, would make each other miss their time limits. They wait half of their time, in
which the other processes compute. What takes long begins first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling


@cache
def rank(file: Path) -> int:
    """The turn of a test file: those with a Ray cluster, then those with a slow test, the rest."""
    source = file.read_text()
    return 0 if "pytest.mark.ray" in source else 1 if "pytest.mark.slow" in source else 2


class Lanes(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the number of its tests says nothing of a file

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if rank(self.config.rootpath / file) else "clusters"
