"""Cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.host import processors
from orchestrator.host.processors import threads_of_card, usable_cores
from workloads.devices import host_device, own_devices


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
    """Siblings share a core; of those that the process may use, the first stands for it."""
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
    """As a container has it, of either kind of control groups."""
    (host / "cpu").mkdir()
    (host / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (host / name).write_text(text + "\n")
    assert usable_cores() == cores


@given(cores=st.integers(1, 256), cards=st.integers(1, 16), spare=st.integers(0, 2))
def test_cards_share_the_cores_that_are_not_spared(cores: int, cards: int, spare: int) -> None:
    """Each has a thread; where there are cores enough, all leave the spared ones free together."""
    threads = threads_of_card(cores, cards, spare)
    assert threads >= 1
    if cores - spare >= cards:
        assert cores - cards < threads * cards + spare <= cores
    else:
        assert threads == 1


def test_a_cpu_card_leaves_a_core_to_the_rest_of_its_host() -> None:
    """A card with memory of its own does not, nor one that is emulated in its name."""
    spared = {spec.name: spec.spare_cores for spec in own_devices()}
    assert spared == {name: int(name == host_device().name) for name in spared}
    assert [threads_of_card(2, 1, spared[name]) for name in ("cpu", "hpu")] == [1, 2]
