"""``drifting`` and ``two_humped``: rows whose mean describes no speed that they had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measurements import row

from orchestrator.analysis.flags import barred, raised_on
from orchestrator.core.measurement import Metrics


def of(**changes: object) -> Metrics:
    """The figures of a row with these changes."""
    return replace(row().metrics, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"hump_ratio": 1.3},
            "two_humped: its repeats are of two speeds, one 1.30 times the other",
        ),
        ({"hump_ratio": 1.04}, ""),
        ({"hump_ratio": None}, ""),
    ],
)
def test_what_is_flagged(changes: dict[str, float | None], said: str) -> None:
    """Above the limit, and never where nothing is known."""
    raised = raised_on(row(metrics=of(**changes)))
    assert bool(raised) is bool(said) is barred(raised)
    assert not said or str(raised[0]).startswith(said)
