"""The gate: planted lies are caught with figure and limit, and honest rows pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from measurement_factory import every_state, large_run
from measurements import from_table
from planted_lies import (
    LIES,
    Lie,
    both,
    columns,
    continuous,
    generation,
    honest_rows,
    replaced,
    rows_of_the_card,
    samples,
    stored,
    timed_by,
    training,
)

from orchestrator.analysis import plausibility
from orchestrator.analysis.flags import raised_on
from orchestrator.analysis.hardware import roofline_of
from orchestrator.analysis.plausibility import most_decoded_per_core_s
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.store.codec import to_table

NAMES = [name for name, *_ in LIES]


def contradictions(row: Measurement) -> tuple[str, ...]:
    return plausibility.contradictions([row])[0]


@pytest.mark.parametrize(("make", "lie", "words"), [lie[1:] for lie in LIES], ids=NAMES)
def test_a_planted_lie_is_caught(make: Callable[[], Measurement], lie: Lie, words: str) -> None:
    assert contradictions(make()) == ()
    assert "suspect" in {one.flag.name for one in raised_on([lie(make())])[0]}
    found = contradictions(lie(make()))
    assert any(word in reason for reason in found for word in words.split("|")), found


def test_an_unknown_card_has_no_limits_and_no_share_of_them() -> None:
    fast = replace(timed_by(0.2)(training()), device_name="A card of next year", started_at=None)
    assert contradictions(fast) == ()
    roofline = roofline_of([fast])
    assert roofline.shares == () and roofline.unknown == ("A card of next year",)
    assert contradictions(replace(fast, device_name=None)) == ()


def test_a_processor_decodes_with_as_many_cores_as_it_has_threads() -> None:
    processor = replaced(emulated=True, peak_device_memory_bytes=None)
    lied = both(processor, columns(parameter_count=20), samples(cpu_s=0))(generation())
    per_core_s = most_decoded_per_core_s(lied)
    assert per_core_s is not None
    timed = [sample for _, sample in lied.samples if not sample.warmup]
    least = math.ceil(max(s.output_tokens / (per_core_s * s.wall_s) for s in timed))
    assert least > 1
    for threads, flagged in ((least - 1, True), (least, False)):
        found = contradictions(replace(lied, threads=threads))
        assert any("a core decoded" in reason for reason in found) is flagged, (threads, found)


def test_facts_that_are_not_known_never_flag() -> None:
    names = [n for n in generation().metrics.__dataclass_fields__ if n != "repeats"]
    for row in (generation(), training(), continuous()):
        for name in names:
            blank = "" if name == "throughput_unit" else None
            assert not contradictions(stored(**{name: blank})(row)), name
        sizes = ("weight_bytes", "parameter_count", "peak_device_memory_bytes")
        times = ("load_s", "warmup_s", "started_at", "threads")
        for name in (*sizes, *times, "train_flops_per_token", "device_name"):
            assert not contradictions(replace(row, **{name: None})), name
        assert not contradictions(replace(row, samples=(), items=()))


def test_rows_and_columns_give_the_same_verdicts() -> None:
    lies = [lie(make()) for _, make, lie, _ in LIES]
    rows = [*rows_of_the_card(), *every_state(items=2), *lies]
    table = to_table([replace(row, metrics=Metrics()) for row in rows])  # a lie has any numbers
    (batch,) = table.select(["samples", "items"]).combine_chunks().to_batches()
    lean = [replace(row, samples=(), items=()) for row in rows]
    verdicts = plausibility.contradictions(lean, batch)
    read = [
        replace(row, samples=stored.samples, items=stored.items)
        for row, stored in zip(rows, from_table(table), strict=True)
    ]
    assert verdicts == plausibility.contradictions(read)
    assert sum(map(bool, verdicts)) >= len(lies) - 1


# ---------------------------------------------------------------- honest rows


@given(honest_rows())
def test_an_honest_row_passes(row: Measurement) -> None:
    assert contradictions(row) == ()


def test_clean_rows_raise_no_alarm() -> None:
    night = [*every_state(), *every_state(emulated=False), *large_run(300, items=3)]
    clean = [*rows_of_the_card(), *night]
    assert len(clean) >= 400
    alarms = {row.attempt_id: found for row in clean if (found := (contradictions(row)))}
    assert alarms == {}


def test_a_window_of_served_requests_holds_parts_of_them() -> None:
    asked = {"output_tokens": 16, "ignore_eos": True}
    odd = replaced(parameters=asked)(generation())
    assert any("16 each" in reason for reason in contradictions(odd))
    assert not any("each" in one for one in contradictions(replace(odd, workload="serving")))
