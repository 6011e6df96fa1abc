"""Drivers of one run on a disk that fails and kills anywhere lose no row and double none."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_disk import Drivers


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_are_safe_stay_safe_and_single(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Six drivers, one after the other, of which most die or give up."""
    drivers = Drivers(tmp_path, seed, monkeypatch)
    for _ in range(6):
        drivers.drive()
    drivers.check()
