"""The time left of a run, by the jobs that ended; recorded runs are replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from core_cases import a_job
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.estimates import times_left
from benchmarks.past_runs import runs_in
from orchestrator.core.job import Job
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import parse_emulation
from orchestrator.planning.forecast import Remaining

RECORDED = Path(__file__).parents[2] / "results/past_runs/rows.parquet"


def planned(job: Job, run_s: float) -> PlannedJob:
    return PlannedJob(job=job, action=Action.RUN, estimate_s=run_s + 4.0, load_s=4.0)


def jobs(count: int, **changes: object) -> list[Job]:
    return [a_job(batch_size=size, **changes) for size in range(1, count + 1)]


def runs(remaining: Remaining, some: Sequence[Job], took_s: float, begin: float) -> float:
    """Run jobs one after the other; returns when the last ended."""
    for job in some:
        remaining.begin(job.job_id, job.job_id, begin)
        begin += took_s
        remaining.end(job.job_id, begin)
        remaining.row(job.job_id, final=True)
    return begin


def left_s(remaining: Remaining, now: float, repeats: float = 0.0) -> float:
    seconds = remaining.left_s(now, repeats)
    assert seconds is not None
    return seconds


def looks(estimates: Sequence[float], factors: Sequence[float], cards: int) -> Iterator[float]:
    """The time left whenever a job ends or begins, of a run whose jobs take these factors of their
    estimates."""
    some = jobs(len(estimates))
    remaining = Remaining(
        planned(job, estimate) for job, estimate in zip(some, estimates, strict=True)
    )
    free_at, ends = [0.0] * cards, []
    for job, estimate, factor in zip(some, estimates, factors, strict=False):
        card = min(range(cards), key=lambda index: free_at[index])
        ends.append((free_at[card] + estimate * factor, free_at[card], job.job_id))
        free_at[card] = ends[-1][0]
    moments = [(at, False, job_id) for at, _, job_id in ends]
    moments += [(at, True, job_id) for _, at, job_id in ends]
    for at, begins, job_id in sorted(moments):
        if begins:
            remaining.begin(job_id, job_id, at)
        else:
            remaining.end(job_id, at)
            remaining.row(job_id, final=True)
        seconds = remaining.left_s(at)
        if seconds is not None:
            yield seconds


ESTIMATES = st.lists(st.floats(0.2, 1e4), min_size=2, max_size=20)
FACTORS = st.lists(st.floats(0.01, 100.0), min_size=20, max_size=20)


@given(ESTIMATES, FACTORS, st.integers(1, 8))
def test_the_time_left_is_never_negative_and_is_nothing_at_the_end(
    estimates: list[float], factors: list[float], cards: int
) -> None:
    seconds = list(looks(estimates, factors, cards))
    assert min(seconds) >= 0.0 and seconds[-1] == pytest.approx(0.0, abs=1e-6 * max(seconds))


@given(ESTIMATES, FACTORS, st.integers(1, 8), st.sampled_from((0.5, 3600.0)))
def test_the_unit_of_time_does_not_matter(
    estimates: list[float], factors: list[float], cards: int, unit: float
) -> None:
    expected = [unit * each for each in looks(estimates, factors, cards)]
    scaled = looks([unit * each for each in estimates], factors, cards)
    assert list(scaled) == pytest.approx(expected, rel=1e-6, abs=1e-6 * unit)


def test_jobs_that_take_ten_times_as_long_as_estimated_make_the_others_so() -> None:
    some = jobs(12)
    remaining = Remaining(planned(job, 2.0) for job in some)
    assert remaining.left_s(0.0) is None
    now = runs(remaining, some[:6], 20.0, 0.0)
    assert left_s(remaining, now) == pytest.approx(120.0, rel=0.3)
    remaining.drop(some[6].job_id)  # it cannot run
    assert left_s(remaining, now) == pytest.approx(100.0, rel=0.3)


def test_a_few_jobs_of_a_setting_tell_how_long_its_others_take_at_any_model() -> None:
    """Jobs in int8 take four times as long, of either model."""
    one, other = (
        (jobs(10, model=model), jobs(10, model=model, precision="int8")) for model in ("m", "n")
    )
    every = (*one[0], *one[1], *other[0], *other[1])
    remaining = Remaining(planned(job, 1.0) for job in every)
    now = runs(remaining, one[0], 1.0, 0.0)
    now = runs(remaining, one[1], 4.0, now)
    now = runs(remaining, other[0], 1.0, now)
    assert left_s(remaining, now) == pytest.approx(40.0, rel=0.4)  # none of these has run


def test_a_job_that_one_thing_disturbed_does_not_rule_the_others() -> None:
    some = jobs(12)
    remaining = Remaining(planned(job, 1.0) for job in some)
    now = runs(remaining, some[:5], 1.0, 0.0)
    now = runs(remaining, some[5:6], 1000.0, now)
    assert left_s(remaining, now) < 6 * 10.0


def test_a_processes_first_job_takes_longer_than_those_after_it() -> None:
    some = jobs(10)
    seconds = []
    for first in (False, True):
        remaining = Remaining(planned(job, 1.0) for job in some)
        remaining.begin("a", some[0].job_id, 0.0, first=first)
        remaining.end("a", 6.0)
        remaining.row("a", final=True)
        seconds.append(left_s(remaining, 6.0))
    assert seconds[1] < 0.6 * seconds[0]


def test_cards_that_wait_for_processors_do_not_count_as_busy() -> None:
    """Four cards whose jobs of two seconds take turns finish one in two seconds, not four."""
    some = jobs(20)
    remaining = Remaining(planned(job, 2.0) for job in some)
    for job in some[:4]:
        remaining.begin(job.job_id, job.job_id, 0.0)
    for turn, job in enumerate(some[:10]):
        at = 2.0 * (turn + 1)
        for other in some[turn + 1 : turn + 4]:
            remaining.waits(other.job_id, at)
        remaining.end(job.job_id, at)
        remaining.row(job.job_id, final=True, waited_s=at - 2.0 if turn < 4 else 6.0)
        remaining.begin(some[turn + 4].job_id, some[turn + 4].job_id, at)
    assert left_s(remaining, 20.0) == pytest.approx(20.0, rel=0.3)


def test_gangs_of_emulated_cards_count_as_those_that_compute_at_once() -> None:
    """Gangs of four come first, on two processors; jobs of one card then take as long, in turns."""
    gangs, single = jobs(4, cards=4), jobs(16)
    nodes = parse_emulation("1x4", [gangs[0].accelerator])
    remaining = Remaining((planned(job, 5.0) for job in (*gangs, *single)), nodes, processors=2)
    now = runs(remaining, gangs, 5.0, 0.0)
    assert left_s(remaining, now) == pytest.approx(80.0, rel=0.3)


def test_jobs_of_warm_processes_do_not_load_what_the_first_of_each_had_to() -> None:
    some = jobs(20)
    remaining = Remaining(planned(job, 2.0) for job in some)
    for job in some[:4]:
        remaining.begin(job.job_id, job.job_id, 0.0, first=True)
    for job in some[:4]:
        remaining.end(job.job_id, 24.0)
        remaining.row(job.job_id, final=True, load_s=20.0)
    assert left_s(remaining, 24.0) < 30.0  # of four cards; 100 s if they loaded again


def test_a_server_to_come_is_loaded_on_as_many_cards_as_the_one_before_it() -> None:
    one, other = (jobs(4, workload="serving", model=model, engine="graph") for model in ("m", "n"))
    remaining = Remaining(planned(job, 5.0) for job in (*one, *other))
    for at, pair, load_s in ((0.0, one[:2], 20.0), (25.0, one[2:], 0.0)):
        for job in pair:
            remaining.begin(job.job_id, job.job_id, at, first=load_s > 0)
        for job in pair:
            remaining.end(job.job_id, at + load_s + 5.0)
            remaining.row(job.job_id, final=True, load_s=load_s)
    seconds_of_cards = 4 * 5.0 + 2 * 20.0
    assert left_s(remaining, 30.0) == pytest.approx(seconds_of_cards / 2, rel=0.4)


def test_a_search_that_took_long_says_how_long_other_searches_take() -> None:
    """Searches take twenty times their estimates, jobs with given sizes as long as estimated."""
    sized, searches = jobs(10), [a_job(model=model, batch_size="best") for model in "mnop"]
    remaining = Remaining(planned(job, 1.0) for job in (*searches, *sized))
    now = runs(remaining, searches[:2], 20.0, 0.0)
    now = runs(remaining, sized, 1.0, now)
    assert left_s(remaining, now) == pytest.approx(2 * 20.0, rel=0.5)
    remaining.begin("trial", searches[2].job_id, now)
    remaining.end("trial", now + 15.0)
    remaining.row("trial", final=False)
    remaining.begin("last", searches[2].job_id, now + 15.0)
    assert left_s(remaining, now + 15.0) == pytest.approx(5.0 + 20.0, rel=0.5)


def test_a_running_jobs_time_is_no_longer_left_and_an_overrun_is_not_negative() -> None:
    some = jobs(8)
    remaining = Remaining(planned(job, 10.0) for job in some)
    now = runs(remaining, some[:6], 10.0, 0.0)
    remaining.begin("a", some[6].job_id, now)
    begun, later = left_s(remaining, now), left_s(remaining, now + 5.0)
    assert begun - later == pytest.approx(5.0, rel=0.3)
    assert left_s(remaining, now + 100.0) > later


def test_the_longest_job_bounds_the_time_left_and_repeats_are_added() -> None:
    some = jobs(10)
    remaining = Remaining(planned(job, 100.0 if job is some[-1] else 1.0) for job in some)
    for job in some[:8]:
        remaining.begin(job.job_id, job.job_id, 0.0)
    for job in some[:8]:
        remaining.end(job.job_id, 1.0)
        remaining.row(job.job_id, final=True)
    assert left_s(remaining, 1.0) > 60.0
    remaining.begin("longest", some[-1].job_id, 1.0)
    assert left_s(remaining, 81.0) < 50.0, "four fifths of it are done"
    remaining.row("longest", final=True)  # lost with its node
    remaining.drop(some[8].job_id)
    assert left_s(remaining, 1.0) == 0.0
    assert left_s(remaining, 1.0, repeats=8.0) == pytest.approx(1.0, rel=0.3)


def test_a_retry_counts_with_what_came_before_and_a_lost_node_leaves_nothing() -> None:
    [first, second] = jobs(2)
    remaining = Remaining([planned(first, 5.0), planned(second, 5.0)])
    remaining.begin("a", first.job_id, 0.0)
    remaining.end("a", 5.0)
    remaining.row("a", final=False)
    assert remaining.left_s(5.0) is None
    now = runs(remaining, [first], 5.0, 5.0)
    assert left_s(remaining, now) == pytest.approx(10.0, rel=0.5)
    remaining.begin("b", second.job_id, now)
    remaining.row("b", final=True)
    assert left_s(remaining, now) == 0.0


def test_the_time_left_of_recorded_runs_is_within_a_factor_of_two_four_times_of_five() -> None:
    """Runs on two cores under loads of 1 to 33; ``benchmarks/estimates.py`` states the share."""
    shares = [
        sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
        for past in runs_in(RECORDED)
        if (ratios := times_left(past))
    ]
    assert len(shares) > 27 and sum(shares) / len(shares) >= 0.8, shares
