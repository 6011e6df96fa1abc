"""Replicates in the report: one cell, with the interval over processes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from measurement_factory import with_interval
from measurements import job, of_job, row

from orchestrator.analysis.comparison import compare
from orchestrator.analysis.flags import raised_by_job
from orchestrator.analysis.replicates import Joined, join
from orchestrator.analysis.selection import settings_of
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement, Metrics
from orchestrator.report.sections import sections
from orchestrator.report.wording import cell, scopes, throughput
from workloads.util.statistics import Spread, mean_interval


def replicate(number: int, value: float, pid: int | None = None, **changes: Any) -> Measurement:
    """A row of a replicate of one cell, with five repeats of 1 % of scatter."""
    size = changes.get("batch_size", 8)
    own = of_job(replace(job(batch_size=size), replicate=number))
    own |= {"batch_size": size, "replicate": number}
    own["worker_pid"] = 1000 + number if pid is None else pid
    half = 0.01 * value * 2.776 / 5**0.5
    metrics = {"repeats": 5, "tpot_p50_s": 0.01, "energy_j": value}
    return with_interval(row(7, **(own | changes)), value, half, **metrics)


def joined(*rows: Measurement) -> Joined:
    raised = raised_by_job(rows)
    return join(rows, settings_of(rows, raised), raised)


def test_the_interval_is_students_over_the_means_of_processes() -> None:
    found = joined(*[replicate(n, value) for n, value in enumerate((90.0, 100.0, 110.0), 1)])
    (cell,) = found.cells
    assert found.rows == (cell.row,)
    expected = mean_interval([90.0, 100.0, 110.0])
    assert expected is not None
    metrics = cell.row.metrics
    assert (metrics.throughput, metrics.processes, metrics.repeats) == (100.0, 3, 15)
    assert (metrics.throughput_low, metrics.throughput_high) == (expected.low, expected.high)
    assert metrics.generated_tokens_per_s == 100.0 and metrics.energy_j == 300.0
    assert cell.spread is not None and cell.spread.within == pytest.approx(1 / 5**0.5, rel=0.01)
    assert cell.spread.between == pytest.approx((100 - 0.2) ** 0.5, rel=0.01)


def test_rows_of_one_process_stay_within_one_process() -> None:
    """Two replicates that one process ran (in-process runs) say nothing of other processes."""
    found = joined(replicate(1, 100.0, pid=7), replicate(2, 104.0, pid=7))
    (cell,) = found.cells
    assert cell.spread is None and cell.row.metrics.processes == 1
    assert throughput(cell.row).endswith("within one process")


def test_a_flagged_or_failed_replicate_is_left_out() -> None:
    good = [replicate(n, 100.0 + n) for n in (1, 2)]
    humped = replicate(3, 50.0)
    humped = replace(humped, metrics=replace(humped.metrics, hump_ratio=1.4))
    failed = replace(replicate(4, 0.0), state=State.FAILED, metrics=Metrics())
    (cell,) = joined(*good, humped, failed).cells
    assert cell.row.metrics.throughput == 101.5 and cell.row.metrics.processes == 2
    assert len(cell.replicates) == 4 and len(cell.counted) == 2
    (all_bad,) = joined(humped, replace(humped, job_id="other", replicate=2)).cells
    assert all_bad.row.job_id == "other"  # flagged itself, so the cell ranks nowhere
    (nothing,) = joined(failed, replace(failed, job_id="x", replicate=2)).cells
    assert nothing.row.state is State.FAILED and nothing.spread is None


def test_without_replicates_rows_stay_as_they_are() -> None:
    rows = (row(0), row(1))
    assert joined(*rows) == Joined(rows=rows)
    alike = (row(0), replace(row(0), job_id="other"), replicate(2, 5.0))
    assert joined(*alike).cells[0].replicates == (alike[2],)
    assert joined(*alike).rows[:2] == alike[:2]


def test_replicates_of_max_that_found_another_size_are_left_out() -> None:
    sizes = {1: 32, 2: 64, 3: 64}
    rows = [
        replicate(n, 100.0 + n, batch_size=size, batch_size_requested="max")
        for n, size in sizes.items()
    ]
    (cell,) = joined(*rows).cells
    assert cell.row.batch_size == 64 and cell.row.metrics.throughput == 102.5


def test_the_report_says_over_what_an_interval_is() -> None:
    summary = summarize([replicate(n, 100.0 + n) for n in (1, 2, 3)] + [row(30)])
    assert len(summary.rows) == 4 and summary.counts[State.SUCCEEDED] == 4
    (table,) = summary.tables
    assert scopes(table) == "± is the interval over 3 processes"
    assert cell(table, "bf16", "8").text == "102.0"
    (ranking,) = summary.rankings
    assert len(ranking.ranked) == 2
    (line,) = next(one.table for one in sections(summary) if one.id == "replicates").rows
    assert line[1] == "3 of 3" and line[2].endswith("over 3 processes")
    alone = summarize([replicate(1, 100.0)])
    assert scopes(alone.tables[0]) == "± is the interval within one process"


def test_a_drift_over_the_night_is_said_above_the_tables() -> None:
    def night(drift: float) -> list[Measurement]:
        chance = random.Random(3)
        rows = []
        for size in range(8):
            for number in (1, 2, 3):
                at = chance.random()
                value = 100 * (size + 1) * (1 - drift * at) * (1 + chance.gauss(0, 0.005))
                own = {"batch_size": size + 1, "started_at": 1e9 + 36_000 * at}
                rows.append(replicate(number, value, **own))
        return rows

    def banner(rows: list[Measurement]) -> list[str]:
        return [b.details[0] for b in summarize(rows).banners if b.name == "Drift over the night"]

    (said,) = banner(night(0.1))
    assert said.startswith("-") and said.endswith("h")
    assert not banner(night(0.0))


def test_runs_are_compared_by_their_cells() -> None:
    before, after = (
        joined(*[replicate(n, value + shift) for n, value in enumerate((90.0, 100.0, 110.0), 1)])
        for shift in (0.0, 3.0)
    )
    found = compare(before.rows, after.rows, noise=0.0)
    (change,) = found.changes
    assert change.ratio.value == pytest.approx(1.03)
    assert not change.significant and change.ratio.low is not None and change.ratio.low < 0.9


def test_what_runs_differ_by_widens_the_interval() -> None:
    """It is common to all processes of a run, so it shows in none of them; within one process
    nothing is added."""
    rows = [replicate(n, value) for n, value in ((1, 100.0), (2, 103.0), (3, 106.0))]
    raised, differ = raised_by_job(rows), Spread(deviation=0.02, values=5)
    plain = join(rows, settings_of(rows, raised), raised).rows[0].metrics
    wider = join(rows, settings_of(rows, raised), raised, runs=differ).rows[0].metrics
    assert plain.relative_half_width and wider.relative_half_width
    common = 2.776 * 0.02
    assert wider.relative_half_width == pytest.approx(
        math.hypot(plain.relative_half_width, common), rel=1e-3
    )
    assert wider.throughput == plain.throughput
    again = summarize(rows, runs_differ=differ).rows
    assert [each.metrics for each in again] == [each.metrics for each in rows]
