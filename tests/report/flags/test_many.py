"""The raw checks on columns let no row pass that the checks of a row would stop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from honest_rows import honest_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from measurement_factory import every_state
from planted_lies import LIES, rows_of_the_card

from orchestrator.domain.job import State
from orchestrator.domain.measurement import Measurement, Metrics
from orchestrator.report.flags.possible import contradictions
from orchestrator.report.flags.possible.many import COLUMNS, doubtful
from orchestrator.results.tables import to_table
from workloads.api import Item, Sample


def looked_at(rows: Sequence[Measurement]) -> list[bool]:
    """The verdict on each row: stopped by its plain columns or as one that needs a closer look."""
    lean = [replace(row, samples=(), items=()) for row in rows]
    raw = [replace(row, metrics=Metrics()) for row in rows]  # of any numbers, as tables are not
    batch = to_table(raw).select(list(COLUMNS)).to_batches()[0]
    plain = [any(contradictions(row)) for row in lean]
    return [one or other for one, other in zip(plain, doubtful(lean, batch), strict=True)]


def test_every_planted_lie_is_stopped() -> None:
    """All of them in one batch, among honest rows."""
    honest = list(rows_of_the_card())
    rows = [lie(make()) for _, make, lie, _ in LIES]
    found = looked_at([*honest, *rows])
    assert all(found[len(honest) :]), [
        n for (n, *_), one in zip(LIES, found[86:], strict=True) if not one
    ]


def test_honest_rows_need_no_closer_look() -> None:
    """Those of a real card but the ones that their time limit cut, and whole nights."""
    cut = [row for row in rows_of_the_card() if any(not s.complete for _, s in row.samples)]
    measured = [
        row for row in (*rows_of_the_card(), *every_state()) if row.state is State.SUCCEEDED
    ]
    stopped = [row for row, one in zip(measured, looked_at(measured), strict=True) if one]
    assert {row.attempt_id for row in stopped} == {row.attempt_id for row in cut}


@settings(max_examples=40, deadline=None)
@given(honest_rows(), st.integers(0, 2**32))
def test_what_a_check_stops_is_stopped_on_columns(row: Measurement, seed: int) -> None:
    """Any one number of any sample or prompt, or any figure, a little off or far off."""
    chance = random.Random(seed)
    factor = chance.choice([0.0, 0.5, 0.98, 0.9995, 1.0005, 1.02, 2.0, 30.0])
    rows = [row]
    for kind, name in ((Sample, "samples"), (Item, "items")):
        raw = getattr(row, name)
        if raw:
            at = chance.randrange(len(raw))
            for field in kind.__dataclass_fields__:
                value = getattr(raw[at][1], field)
                if type(value) in (int, float):
                    changed = replace(raw[at][1], **{field: type(value)(value * factor)})
                    rows.append(
                        replace(row, **{name: (*raw[:at], (raw[at][0], changed), *raw[at + 1 :])})
                    )
    for field in row.metrics.__dataclass_fields__:
        value = getattr(row.metrics, field)
        if type(value) in (int, float):
            changed = replace(row.metrics, **{field: type(value)(value * factor)})
            rows.append(replace(row, metrics=changed))
    for one, stopped in zip(rows, looked_at(rows), strict=True):
        assert stopped or not list(contradictions(one))


@pytest.mark.parametrize("changes", [{"samples": ()}, {"items": ()}, {"samples": (), "items": ()}])
def test_rows_without_raw_values_pass(changes: dict[str, tuple[()]]) -> None:
    """There is nothing to look at."""
    rows = [
        replace(row, **changes)
        for row in rows_of_the_card()
        if all(s.complete for _, s in row.samples)
    ]
    assert not any(looked_at(rows))
