"""Limits of tests follow the load: never shorter than on an idle machine, never without end."""

from __future__ import annotations

import os

import patience
import pytest


@pytest.mark.parametrize(
    ("load_per_core", "waiting", "longest"), [(0, 0.0, 1), (3, 0.0, 4), (0, 0.8, 5), (99, 1.0, 12)]
)
def test_limits_grow_with_the_load(
    load_per_core: float, waiting: float, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "getloadavg", lambda: (load_per_core * cores, 0.0, 0.0))
    monkeypatch.setattr(patience, "share_waiting", lambda: waiting)
    assert patience.patience(10) == pytest.approx(10 * longest)


def test_waiting_ends_when_the_condition_holds_or_never_will() -> None:
    answers = iter([False, False, True])
    assert patience.until(lambda: next(answers), 10, every_s=0)
    assert not patience.until(lambda: False, 0.01)
