"""Cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.util import host as processors
from orchestrator.util.host import usable_cores


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of eight hardware threads in pairs, {0,4} {1,5} {2,6} {3,7}, all of them allowed."""
    for number in range(8):
        (tmp_path / f"siblings{number}").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(processors, "SIBLINGS", str(tmp_path / "siblings{}"))
    monkeypatch.setattr(processors, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def test_one_hardware_thread_of_each_core_counts(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable_cores() == (0, 1, 2, 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 6})
    assert usable_cores() == (2, 5)


@pytest.mark.parametrize(
    ("name", "text", "cores"),
    [
        ("cpu.max", "250000 100000", (0, 1)),
        ("cpu.max", "50000 100000", (0,)),  # a part of a core is one that is shared
        ("cpu.max", "max 100000", (0, 1, 2, 3)),
        ("cpu.max", "800000 100000", (0, 1, 2, 3)),
        ("cpu.max", "nonsense", (0, 1, 2, 3)),
        ("cpu/cpu.cfs_quota_us", "300000", (0, 1, 2)),
        ("cpu/cpu.cfs_quota_us", "-1", (0, 1, 2, 3)),
    ],
)
def test_a_quota_of_the_control_group_limits_them(
    host: Path, name: str, text: str, cores: tuple[int, ...]
) -> None:
    (host / "cpu").mkdir()
    (host / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (host / name).write_text(text + "\n")
    assert usable_cores() == cores
