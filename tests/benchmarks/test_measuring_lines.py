"""Jobs of the grid beside a script: the lines follow from the attempts and the script's turns."""

from __future__ import annotations

import pytest

from benchmarks.measuring import lines_of

SHARE = "in the grid, a warm worker, as a share of the script's speed"
SCRIPT: dict[str, float] = {
    "tokens_per_s": 1.0,
    "tokens_per_cpu_s": 1.0,
    "load_s": 1.0,
    "peak_mib": 1.0,
}


@pytest.mark.parametrize(
    ("jobs", "warm", "fresh", "met"),
    [
        (6, 1.0, 1.0, True),
        (6, 0.95, 0.95, True),  # both lose alike
        (6, 0.95, 1.0, False),
        (5, 1.0, 1.0, None),  # too few for an interval
    ],
)
def test_warm_and_fresh_workers_are_compared_by_an_interval(
    jobs: int, warm: float, fresh: float, met: bool | None
) -> None:
    attempts: list[dict[str, float | None]] = [
        {**SCRIPT, "start_s": start_s, "tokens_per_s": speed}
        for start_s, speed in [(1.0, fresh), (None, warm)] * jobs
    ]
    found = lines_of(attempts, [SCRIPT] * (2 * jobs + 1), 1.0)
    assert {line.what: line.met for line in found}[SHARE] is met


def test_the_start_of_a_worker_stands_beside_that_of_the_script() -> None:
    script = SCRIPT | {"load_s": 3.0}
    attempts = [{**SCRIPT, "start_s": 0.1, "load_s": 0.5}, {**SCRIPT, "start_s": None}]
    lines = {line.what: line for line in lines_of(attempts, [script] * 3, 4.0)}
    start = lines["start of a worker's process"]
    assert not start.theirs and "starts in 4.0 s and loads the model at first in 3.0" in start.note
