"""The way in which a run comes to its cards, and the trouble that its board shows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.driver import plan
from orchestrator.driver.options import RunOptions
from orchestrator.driver.run import trouble_of
from orchestrator.planning import forecast


@pytest.mark.parametrize(
    ("options", "variable", "kind"),
    [
        (RunOptions(in_process=True, address="there"), "", forecast.IN_PROCESS),
        (RunOptions(address="there"), "", forecast.CLUSTER),
        (RunOptions(), "there", forecast.CLUSTER),
        (RunOptions(emulate="1x1"), "there", forecast.PRIVATE),
        (RunOptions(), "", forecast.PRIVATE),
    ],
)
def test_the_way_to_the_cards_is_known_without_reading_earlier_runs(
    options: RunOptions, variable: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner's knowledge has the same kind; only that one reads what earlier runs took."""
    monkeypatch.setenv("RAY_ADDRESS", variable)
    read: list[Path] = []

    def no_runs(results: Path) -> list[str]:
        read.append(results)
        return []

    monkeypatch.setattr("orchestrator.driver.plan.runs", no_runs)
    assert plan.start_of(options) == kind
    assert not read
    assert plan.startup_of(options).kind == kind
    assert read == [options.results]


def test_what_cannot_be_in_trouble_is_in_none() -> None:
    """An executor or a mirror that is not there, too."""
    assert [trouble_of(each) for each in (None, object(), SimpleNamespace(trouble="away"))] == [
        *("", "", "away")
    ]
