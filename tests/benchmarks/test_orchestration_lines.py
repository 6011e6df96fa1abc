"""No-op jobs beside peers: warm stands beside warm, cold beside cold with as many jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import orchestration
from benchmarks.setting import Setting


class Started:
    """A contender that was told its arguments and tells of as many jobs."""

    def __init__(self, name: str, jobs: int, workers: int) -> None:
        self.name = name
        driver_s = None if name == "hydra-ray-launcher" else 0.1
        self.told = {"work": jobs, "wall_s": 2.0, "cpu_s": driver_s, "rows_per_file": 4.0}
        self.told |= {"whole_jobs": workers + jobs, "whole_s": 30.0}

    def ready(self) -> float:
        return 5.0


def started(setting: Setting, stack: object, name: str, *arguments: Any) -> Started:
    _python, _program, jobs, nodes, cards, *_ = arguments
    return Started(name, jobs, nodes * cards)


def turns_of(
    setting: Setting, contenders: Sequence[Started], *, turns: int, warm_ups: int
) -> Mapping[str, list[dict[str, Any]]]:
    return {each.name: [each.told] * turns for each in contenders}


def night(
    grid: Path, name: str, results: Path, *, emulate: str, variables: object
) -> tuple[float, list[None]]:
    jobs = len(json.loads(grid.read_text())["experiments"][0]["axes"]["batch_size"])
    return 7.0, [None] * jobs


@pytest.mark.parametrize("quick", [False, True])
def test_peers_are_compared_warm_and_cold(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, fake in (("started", started), ("turns_of", turns_of)):
        monkeypatch.setattr(Setting, name, fake)
    monkeypatch.setattr(orchestration, "night", night)
    setting = Setting(
        scratch=tmp_path, peers_python=Path("python"), quick=quick, say=lambda _: None
    )
    lines, facts = orchestration.run(setting)
    found = {(line.what.partition(",")[0], line.against): line for line in lines}
    assert found["jobs/s", "Ray Tune, class, reuse_actors"].cpu_ratio is not None
    cold = found["48 jobs", "hydra-ray-launcher"]
    assert (cold.ours, cold.theirs) == ((7.0,), (35.0,))
    if quick:
        assert ("jobs/s", "hydra-ray-launcher") not in found
        return
    assert found["48 jobs", "Ray Tune, class, reuse_actors"].theirs == (35.0,)
    warm = found["jobs/s", "hydra-ray-launcher"]
    assert warm.theirs == (32.0,) and warm.cpu_ratio is None and not warm.note
    assert facts["jobs of each peer after as many as there are cards"][warm.against] == 64
