"""The time left of a run, by its first jobs; recorded runs are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_cases import a_job

from benchmarks.estimates import times_left
from benchmarks.past_runs import runs_in
from orchestrator.core.job import Job
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.planning.forecast import FIRST_SHARE, Remaining

RECORDED = Path(__file__).parents[2] / "results/past_runs/rows.parquet"


def planned(job: Job, run_s: float) -> PlannedJob:
    return PlannedJob(job=job, action=Action.RUN, estimate_s=run_s + 4.0, load_s=4.0)


def jobs(count: int, **changes: object) -> list[Job]:
    return [a_job(batch_size=size, **changes) for size in range(1, count + 1)]


def test_a_job_that_takes_ten_times_as_long_makes_all_of_its_kind_ten_times_as_long() -> None:
    some = jobs(4)
    remaining = Remaining(planned(job, 2.0 * n) for n, job in enumerate(some, 1))
    assert remaining.left_s({}) is None
    remaining.take(some[0].job_id, 20.0)
    assert remaining.left_s({}) == pytest.approx(10 * (4 + 6 + 8))
    remaining.take(some[1].job_id)  # it never ran
    assert remaining.left_s({}) == pytest.approx(10 * (6 + 8))


def test_another_precision_leans_on_the_rows_of_its_engine_until_it_has_its_own() -> None:
    slow, fast = jobs(8, precision="fp32"), jobs(8, precision="bf16")
    remaining = Remaining(planned(job, 1.0) for job in (*slow, *fast))
    for job in slow:
        remaining.take(job.job_id, 10.0)
    assert remaining.left_s({}) == pytest.approx(80.0)
    for job in fast[:4]:
        remaining.take(job.job_id, 1.0)
    assert 4.0 < remaining.left_s({}) < 16.0  # type: ignore[operator]


def test_a_kind_of_job_that_never_ran_leaves_no_time() -> None:
    [slow], [fast] = jobs(1, precision="fp32"), jobs(1, precision="bf16")
    remaining = Remaining([planned(slow, 1.0), planned(fast, 1.0)])
    remaining.take(slow.job_id)  # given up
    remaining.take(fast.job_id, 3.0)
    assert remaining.left_s({}) == 0.0


def test_what_a_running_job_has_had_is_no_longer_left_and_an_overrun_is_not_negative() -> None:
    first, second, third = jobs(3)
    remaining = Remaining(planned(job, 10.0) for job in (first, second, third))
    remaining.take(first.job_id, 10.0)
    assert remaining.left_s({second.job_id: 4.0}) == pytest.approx(16.0)
    assert remaining.left_s({second.job_id: 100.0}) == pytest.approx(10.0 + 20.0)


def test_a_first_job_counts_in_part_and_one_disturbed_job_does_not_rule_the_others() -> None:
    some = jobs(6)
    remaining = Remaining(planned(job, 1.0) for job in some)
    remaining.take(some[0].job_id, 10.0, first=True)
    assert remaining.left_s({}) == pytest.approx(5 * 10 * FIRST_SHARE)
    for job in some[1:3]:
        remaining.take(job.job_id, 4.0)
    remaining.take(some[3].job_id, 1000.0)
    assert remaining.left_s({}) < 2 * 8.0  # type: ignore[operator]


def test_the_time_left_of_recorded_runs_is_within_a_factor_of_two_three_times_of_four() -> None:
    """Runs on two cores under loads of 1 to 30; ``benchmarks/estimates.py`` states the share."""
    ratios = [ratio for past in runs_in(RECORDED) for ratio in times_left(past)]
    close = sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
    assert len(ratios) > 250 and close >= 0.7, close
