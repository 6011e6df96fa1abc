"""The summary of a run's rows."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurement_factory import START, Night, a_job, every_state, with_interval

from orchestrator.analysis.metrics import peak_memory_bytes
from orchestrator.analysis.selection import newest_final
from orchestrator.analysis.summary import summarize
from orchestrator.analysis.timeline import timeline_of
from orchestrator.core.job import MAX, Accelerator, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import LOST, SEARCH_ENDED
from orchestrator.report import wording
from orchestrator.report.interactive import cards_figure
from orchestrator.report.svg import nice_top
from orchestrator.report.wording import cell


def measured(values: dict[str, tuple[float, float | None]]) -> list[Measurement]:
    night = Night()
    rows = [night.add(a_job(precision=precision)) for precision in values]
    return [with_interval(row, *values[row.precision]) for row in rows]


def row_of(state: State = State.SUCCEEDED, *, real: bool = False, **changes: Any) -> Measurement:
    return Night(emulated=not real).add(a_job(), state, **changes)


FAILED = row_of(State.FAILED, recorded_at=START)
AGAIN = row_of(invocation_id="night-2", recorded_at=START + 2)
RETRY = row_of(State.LOST, final=False, recorded_at=START + 3)
MEASURED = row_of(recorded_at=START)
CUT_SHORT = row_of(State.NOT_STARTED, recorded_at=START + 2)
REAL = row_of(real=True, recorded_at=START)
REHEARSAL = row_of(recorded_at=START + 2)
WRONG_CLOCK = row_of(recorded_at=START, ended_at=START + 9e6)
LATER = row_of(State.UNSUPPORTED, recorded_at=START + 1)
WITHOUT_TIMES = row_of(State.UNSUPPORTED)


@pytest.mark.parametrize(
    ("rows", "newest"),
    [
        pytest.param([FAILED, AGAIN, RETRY], AGAIN, id="attempts that are not final never count"),
        pytest.param([AGAIN, FAILED, RETRY], AGAIN, id="by time, not by place"),
        pytest.param([row_of(), WITHOUT_TIMES], WITHOUT_TIMES, id="without times: by place"),
        pytest.param([MEASURED, CUT_SHORT], MEASURED, id="no answer never hides a success"),
        pytest.param([REAL, REHEARSAL], REAL, id="emulated cards never hide real ones"),
        pytest.param([REHEARSAL, REAL], REAL, id="real ones hide emulated cards"),
        pytest.param([WRONG_CLOCK, LATER], LATER, id="the time of recording decides"),
    ],
)
def test_the_newest_final_row_of_a_job_counts(rows: list[Measurement], newest: Measurement) -> None:
    assert newest_final(rows) == summarize(rows).rows == (newest,)


@given(st.randoms(use_true_random=False))
def test_counts_add_up_whatever_the_rows(source: random.Random) -> None:
    night = Night(seed=source.randrange(1000))
    for _ in range(source.randrange(1, 25)):
        job = a_job(
            precision=source.choice(["fp32", "bf16", "int8"]),
            batch_size=source.choice([1, 8, MAX]),
            cards=source.choice([1, 2]),
            accelerator=source.choice(list(Accelerator)),
        )
        states = [s for s in State if s.terminal]
        night.add(job, source.choice(states), items=1, final=source.random() < 0.9)
    summary = summarize(night.rows)
    jobs = {row.job_id for row in night.rows if row.final}
    assert sum(summary.counts.values()) == len(jobs) == len(summary.rows)
    cells = [row.job_id for table in summary.tables for row in table.cells.values()]
    assert sorted(cells) == sorted(jobs)
    failed = [row.job_id for cause in summary.causes for row in cause.rows]
    assert len(failed) == len(jobs) - summary.counts.get(State.SUCCEEDED, 0)


def test_out_of_memory_and_its_kin_are_answers() -> None:
    night = Night()
    for batch, state in enumerate((State.OUT_OF_MEMORY, State.PRUNED, State.UNSUPPORTED), 1):
        night.add(a_job(batch_size=batch), state)
    assert summarize(night.rows).verdict == "All 3 jobs have an answer; 0 measured."
    night.add(a_job(batch_size=9), State.LOST)
    assert "1 job of 4 ended without an answer" in summarize(night.rows).verdict


def test_cells_that_a_search_left_out_are_not_without_an_answer() -> None:
    night = Night()
    night.add(a_job(batch_size=1))
    night.add(a_job(batch_size=2), State.FAILED)
    night.add(a_job(batch_size=3), State.NOT_STARTED, reason=f"{SEARCH_ENDED}: all are tried")
    summary = summarize(night.rows)
    assert (summary.unsettled, summary.left_out) == (1, 1)
    chosen = "The search chose 2 of 3 jobs: 1 of them without an answer; 1 measured."
    assert summary.verdict == chosen


def test_unequal_work_is_not_in_one_table_nor_ranked_together() -> None:
    night = Night()
    night.add(a_job())
    night.add(a_job(parameters=(("attention", "sdpa"), ("output_tokens", 16))))
    night.add(a_job(cards=4))
    night.add(a_job(dataset="english-prompts"))
    summary = summarize(night.rows)
    assert [len(table.cells) for table in summary.tables] == [2, 1, 1]
    assert len(summary.rankings) == 4 and summary.tables[0].best == frozenset()
    assert set(summary.tables[0].lines) == {"output tokens 128", "output tokens 16"}
    assert summary.shared["text-generation"]["engine"] == "transformers"


@pytest.mark.parametrize(
    ("precisions", "sizes", "columns"),
    [
        (("bf16", "fp32"), (2,), [("fp32", "bf16")]),
        (("fp32",), (MAX, 16, 2), [("2", "16", "max")]),
        (("mystery", "bf16", "fp32"), (16, 2), [("2", "16")] * 2),
    ],
)
def test_settings_are_lines_where_precision_or_size_leaves_an_axis(
    precisions: tuple[str, ...], sizes: tuple[int | str, ...], columns: list[tuple[str, ...]]
) -> None:
    night = Night()
    for attention, precision, size in product(("sdpa", "eager"), precisions, sizes):
        parameters = (("attention", attention),)
        night.add(a_job(precision=precision, batch_size=size, parameters=parameters))
    tables = summarize(night.rows).tables
    assert [table.columns for table in tables] == columns
    if len(columns) > 1:
        assert tables[0].lines == ("fp32", "bf16", "mystery")


@pytest.mark.parametrize(
    ("halves", "verdict", "marks"),
    [
        ((5.0, 3.0, 3.5), "tied", ("~", "~", "")),
        ((None, None), "not known", ("~", "~")),
        ((5.0, None), "not known", ("~", "~")),
        ((None, 5.0), "not known", ("~", "~")),
        ((2.0, 2.0), "clear winner", ("*", "")),
    ],
)
def test_a_winner_needs_intervals_of_the_first_and_the_second_that_do_not_overlap(
    halves: tuple[float | None, ...], verdict: str, marks: tuple[str, ...]
) -> None:
    rates = {"bf16": 100.0, "fp16": 92.0, "fp32": 91.0}
    rows = measured(dict(zip(rates, zip(rates.values(), halves, strict=False), strict=False)))
    summary = summarize(rows)
    (ranking,), (table,) = summary.rankings, summary.tables
    assert ranking.verdict == verdict and ranking.fastest.precision == "bf16"
    assert (ranking.winner is not None) == ("*" in marks)
    assert [row.precision for row in ranking.tied] == ["fp16"] * ("~" in marks)
    (size,) = table.columns
    assert tuple(cell(table, precision, size).mark for precision in rates)[: len(marks)] == marks


def test_emulated_and_real_rows_are_kept_apart() -> None:
    night = Night()
    night.add(a_job(precision="fp32"))
    night.emulated = False
    night.add(a_job(precision="bf16"), versions={"torch": "2.14.0"})
    summary = summarize(night.rows)
    assert [fact.name for fact in summary.provenance.mixed] == ["torch"]
    assert [table.setting.emulated for table in summary.tables] == [True, False]
    assert "emulated on AMD EPYC 9B14" in summary.tables[0].title
    assert summary.banners[0].name == "Emulated cards" and summary.banners[0].count == 1


def test_a_banner_never_counts_more_rows_than_there_are() -> None:
    """A worker may name random weights before its attempt fails; that row has no figures."""
    night = Night()
    for size, state in ((1, State.SUCCEEDED), (2, State.SUCCEEDED), (4, State.FAILED)):
        night.add(a_job(batch_size=size), state)
    night.rows[1] = replace(night.rows[1], random_weights=False)
    failed = replace(night.rows[2], random_weights=True, details={LOST: "it fell off the bus"})
    banners = {one.name: one for one in summarize([*night.rows[:2], failed]).banners}
    shown = {name: (banners[name].count, banners[name].of) for name in banners}
    assert (shown["Random weights"], shown["Lost cards"]) == ((1, 2), (1, 3))
    assert "Random weights" not in {one.name for one in summarize([failed]).banners}


def test_a_row_that_never_ran_joins_the_table_of_the_only_device() -> None:
    night = Night()
    night.add(a_job())
    night.add(a_job(precision="int4"), State.UNSUPPORTED, emulated=False)
    (table,) = summarize(night.rows).tables
    assert table.lines == ("bf16", "int4")
    night = Night(emulated=False)
    night.add(a_job(), device_name="Gaudi2")
    night.add(a_job(precision="fp32"), device_name="Gaudi3")
    night.add(a_job(precision="int4"), State.UNSUPPORTED)
    devices = [table.setting.device for table in summarize(night.rows).tables]
    assert devices == ["Gaudi2", "Gaudi3", ""]


def test_causes_gather_rows_that_differ_in_numbers_only() -> None:
    summary = summarize(every_state(items=1))
    out_of_memory = [c for c in summary.causes if c.state is State.OUT_OF_MEMORY]
    assert len(out_of_memory) == 1 and len(out_of_memory[0].rows) == 10
    states = [cause.state for cause in summary.causes]
    assert states.index(State.FAILED) < states.index(State.OUT_OF_MEMORY)
    assert summary.causes[0].example.failure_tail
    (attempts,) = summary.retried  # probes are no retries
    assert [attempt.state for attempt in attempts] == [State.LOST, State.SUCCEEDED]


def test_idle_time_is_counted_within_invocations_only() -> None:
    night = Night()
    first = replace(night.add(a_job(batch_size=1)), started_at=0.0, ended_at=10.0)
    other = replace(night.add(a_job(batch_size=2)), started_at=0.0, ended_at=4.0, card_indices=(5,))
    later = replace(first, invocation_id="night-2", started_at=86_400.0, ended_at=86_410.0)
    within = replace(first, attempt_id="retry", started_at=3.0, ended_at=5.0)
    timeline = timeline_of([first, other, later, within])
    assert timeline.wall_s == 20.0
    by_card = {lane.card: (lane.assigned_s, lane.unassigned_s) for lane in timeline.lanes}
    assert by_card == {first.card_indices[0]: (20.0, 0.0), 5: (4.0, 16.0)}


def test_a_gang_over_two_nodes_holds_cards_on_both_which_are_sorted_as_people_count() -> None:
    row = replace(Night().add(a_job()), nodes=("n-10", "n-9"), card_indices=(*range(8), *range(8)))
    lanes = timeline_of([row]).lanes
    assert [lane.name for lane in lanes] == [f"n-{n}/HPU{i}" for n in (9, 10) for i in range(8)]


def test_the_cards_figure_tells_times_in_a_unit_of_the_run_s_length() -> None:
    for wall_s, tick in ((20.0, ">10 s<"), (600.0, ">5 min<")):
        row = replace(Night().add(a_job()), started_at=0.0, ended_at=wall_s)
        assert tick in cards_figure(timeline_of([row]), "cards", lambda row: ["fp32"])


def test_memory_is_the_devices_or_what_the_host_grew_by() -> None:
    row = Night().add(a_job())
    host = replace(row, peak_host_memory_bytes=900, baseline_host_memory_bytes=400)
    assert peak_memory_bytes(host) == 500
    assert peak_memory_bytes(replace(host, peak_device_memory_bytes=77)) == 77
    assert peak_memory_bytes(replace(host, peak_host_memory_bytes=None)) is None


@given(st.floats(1e-6, 1e12))
def test_an_axis_holds_its_values_with_few_ticks(value: float) -> None:
    top, step = nice_top(value)
    assert top >= value * 0.999999
    assert 2 <= round(top / step) + 1 <= 8


def test_energy_names_the_most_work_per_joule_setting_where_it_is_known() -> None:
    fast, slow = measured({"bf16": (200.0, 2.0), "int4": (100.0, 1.0)})
    (ranking,) = summarize([fast, slow]).rankings
    assert ranking.most_work_per_joule is None and wording.energy(None) == "not known"
    metered = replace(slow, metrics=replace(slow.metrics, energy_j=1500.0, power_w=50.0))
    (ranking,) = summarize([fast, metered]).rankings
    assert ranking.fastest == fast and wording.energy(ranking.fastest) == "not known"
    assert ranking.most_work_per_joule == metered
    assert wording.energy(ranking.most_work_per_joule) == "2.000 tokens/J (50.0 W)"
