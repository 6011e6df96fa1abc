"""``not_steady`` and ``compiled_in_timed_part`` read columns of a row; null is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measurements import row

from orchestrator.analysis.flags import OWN, barred, raised_on
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement


def reasons(one: Measurement) -> dict[str, str]:
    """The reasons of the two flags that a row has."""
    names = ("not_steady", "compiled_in_timed_part")
    return {r.flag.name: r.reason for r in raised_on(one) if r.flag.name in names}


def drifting(drift: float | None) -> Measurement:
    one = row()
    return replace(one, metrics=replace(one.metrics, drift=drift))


@pytest.mark.parametrize("drift", [None, 0.0, 0.05, -0.05])
def test_a_steady_row_has_neither(drift: float | None) -> None:
    """Nor has a row of which nothing is known, as an older one."""
    assert reasons(drifting(drift)) == {}
    steady = replace(drifting(drift), warmup_end="complete", shapes=4, shapes_unmet=0)
    assert reasons(replace(steady, timed_parts=2, timed_compilations=0)) == {}


def test_a_warm_up_that_was_cut_is_told_with_its_limit_and_what_it_missed() -> None:
    """Two of four shapes were met first while the clock ran."""
    cut = replace(row(), warmup_end="limit", shapes=4, shapes_unmet=2)
    assert reasons(cut) == {
        "not_steady": "its warm-up was cut by warmup_limit_s (1800 s) before 2 of 4 shapes were met"
    }
    late = reasons(replace(cut, shapes_unmet=0))["not_steady"]
    assert late == "its warm-up was cut by warmup_limit_s (1800 s)"
    assert barred(raised_on(cut))


def test_drift_is_told_with_its_direction() -> None:
    """A slow beginning, and steps that became slower."""
    slow = reasons(drifting(0.31))["not_steady"]
    assert "slow beginning makes the timed part 31% slower" in slow and "at most 5%" in slow
    assert "became slower, by 40%" in reasons(drifting(-0.2))["not_steady"]


def test_compilation_in_the_timed_part_is_told_with_its_number() -> None:
    """Rows that have it rank nowhere; a row without a figure has no flag."""
    compiled = replace(row(), timed_compilations=3, timed_parts=2)
    reason = reasons(compiled)["compiled_in_timed_part"]
    assert reason.startswith("3 graphs were compiled while it was timed once more")
    once = reasons(replace(compiled, timed_compilations=1, timed_parts=1))
    assert once["compiled_in_timed_part"].startswith("1 graph was compiled while it was timed; ")
    assert barred(raised_on(compiled))
    assert reasons(replace(compiled, state=State.FAILED)) == {}
    assert {"not_steady", "compiled_in_timed_part"} <= {flag.name for flag in OWN}
