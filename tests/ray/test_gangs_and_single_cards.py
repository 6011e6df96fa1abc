"""Gangs neither starve behind one-card jobs nor tear servers apart, on two emulated servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import patience

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sixty one-card jobs, and gangs of 8, 4 and 2 that come when every card is busy."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, str(HERE / "two_servers.py"), str(tmp_path_factory.mktemp("night"))],
        capture_output=True,
        text=True,
        env=environment
        | {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))},
        timeout=patience(360),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_everything_runs_once(night: dict[str, Any]) -> None:
    """Every job has one final row, and it succeeded."""
    assert night["finished"] and night["ends"] == ["SUCCEEDED"] * night["jobs"]


def test_gangs_do_not_wait_for_the_backlog(night: dict[str, Any]) -> None:
    """Each gang begins while at least a quarter of the one-card jobs have not."""
    singles = sorted(one["began"] for one in night["attempts"] if not one["gang"])
    gangs = [one for one in night["attempts"] if one["gang"]]
    assert sorted(one["width"] for one in gangs) == [2, 4, 8]
    for gang in gangs:
        still_waiting = sum(began > gang["began"] for began in singles)
        assert still_waiting > len(singles) / 4, (gang, still_waiting)


def test_gangs_have_whole_aligned_sets_to_themselves(night: dict[str, Any]) -> None:
    """A gang of n is on one server, on cards k·n to k·n + n - 1, and alone there in its time."""
    for gang in (one for one in night["attempts"] if one["gang"]):
        width, cards = gang["width"], gang["cards"]
        assert len(gang["nodes"]) == 1
        assert cards == list(range(cards[0], cards[0] + width)) and cards[0] % width == 0
        for other in night["attempts"]:
            if other is not gang and other["nodes"] == gang["nodes"]:
                apart = other["ended"] <= gang["began"] or other["began"] >= gang["ended"]
                assert apart or not set(other["cards"]) & set(cards)
