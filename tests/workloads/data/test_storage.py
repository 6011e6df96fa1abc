"""The speed of storage: what is written and read is counted, and nothing stays."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from workloads.data import storage
from workloads.util.files import MIB


def test_rates_are_what_was_done_over_its_time(tmp_path: Path) -> None:
    ticks = itertools.count()
    found = storage.measure(
        tmp_path, large_bytes=4 * MIB, small_files=3, limit_s=99, clock=lambda: next(ticks)
    )
    assert (found.large_bytes, found.small_files) == (4 * MIB, 3)
    assert found.write_bytes_per_s == 2 * MIB  # read at the beginning, after a piece, at the end
    assert found.read_bytes_per_s == pytest.approx(2 * MIB)
    assert found.files_written_per_s == pytest.approx(3 / 4)
    assert found.operations_per_s == pytest.approx(9 / 4)
    assert not list(tmp_path.iterdir())


def test_each_part_ends_when_its_time_is_over(tmp_path: Path) -> None:
    ticks = itertools.count()
    found = storage.measure(
        tmp_path, large_bytes=64 * MIB, small_files=50, limit_s=2, clock=lambda: next(ticks)
    )
    assert 4 * MIB <= found.large_bytes < 64 * MIB
    assert 1 <= found.small_files < 50


def test_the_command_says_it_in_words_and_as_json(tmp_path, nightgrid, monkeypatch) -> None:
    monkeypatch.setattr(storage, "LARGE_BYTES", MIB)
    monkeypatch.setattr(storage, "SMALL_FILES", 20)
    assert nightgrid("dataset", "probe", tmp_path, "--json").json["read_bytes_per_s"] > 0
    assert "files/s" in nightgrid("dataset", "probe", tmp_path).out
    assert "none" in nightgrid("dataset", "probe", tmp_path / "none", code=1).err
