"""The way in which a run comes to its cards, and the trouble that its board shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.planning import duration
from orchestrator.runtime import grid_plan
from orchestrator.runtime.options import RunOptions
from orchestrator.runtime.run import _trouble


@pytest.mark.parametrize(
    ("options", "variable", "kind"),
    [
        (RunOptions(in_process=True, address="there"), "", duration.IN_PROCESS),
        (RunOptions(address="there"), "", duration.CLUSTER),
        (RunOptions(), "there", duration.CLUSTER),
        (RunOptions(emulate="1x1"), "there", duration.PRIVATE),
        (RunOptions(), "", duration.PRIVATE),
    ],
)
def test_the_way_to_the_cards_is_known_without_reading_earlier_runs(
    options: RunOptions, variable: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner's knowledge has the same kind; only that one reads what earlier runs took."""
    monkeypatch.setenv("RAY_ADDRESS", variable)
    read: list[Path] = []

    def earlier(results: Path, kind: str) -> tuple[float, ...]:
        read.append(results)
        return (1.0,)

    monkeypatch.setattr(grid_plan, "_earlier_starts", earlier)
    assert grid_plan.start_of(options) == kind
    assert not read
    assert grid_plan.startup_of(options).kind == kind
    assert read == [options.results]


def test_what_cannot_be_in_trouble_is_in_none() -> None:
    """An executor or a mirror that is not there, too."""
    assert [_trouble(each) for each in (None, object(), SimpleNamespace(trouble="away"))] == [
        *("", "", "away")
    ]
