"""The suite itself: its clusters take turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from lanes import Lanes, rank

TESTS = Path(__file__).resolve().parents[1]


def test_every_test_with_a_cluster_waits_for_its_turn(request: pytest.FixtureRequest) -> None:
    """A file is known by the mark in its source: no mark that pytest knows is spelt otherwise."""
    items = request.session.items
    assert {rank(item.path) for item in items if item.get_closest_marker("ray")} <= {0}
    assert rank(TESTS / "ray" / "test_telemetry_on_ray.py") == 0
    lanes = Lanes.__new__(Lanes)  # without processes
    lanes.config = request.config
    first, second = ("tests/ray/test_telemetry_on_ray.py::test_a", "tests/ray/test_strangers.py::b")
    assert lanes._split_scope(first) == lanes._split_scope(second) == "shared clusters"
    assert lanes._split_scope("tests/chaos/test_chaos.py::test_c") == "one cluster after another"
    own = "tests/project/test_lanes.py"
    assert lanes._split_scope(f"{own}::test_d") == own
