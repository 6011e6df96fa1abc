"""Trends over nights: changes are found with their significance, noise is not; the page says so."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Nightgrid
from measurement_factory import START, Night, a_job, with_interval

from orchestrator.analysis.ratio import ASSUMED_NOISE
from orchestrator.analysis.trends import Trends, trends_of
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.all_runs import since_last, since_text
from orchestrator.store.store import Store
from orchestrator.watch.notify import Ending, Notice

DAY_S = 86_400.0


def nights(
    seed: int, *, jobs: int = 12, count: int = 8, noise: float = 0.01, slower: dict[int, float]
) -> list[Measurement]:
    chance = random.Random(seed)
    rows = []
    for number in range(jobs):
        made = Night(emulated=False).add(a_job(batch_size=number + 1), items=0)
        for night in range(count):
            rate = 100.0 * (1 + chance.gauss(0, noise))
            rate *= slower.get(number, 1.0) if night >= 5 else 1.0
            at = START + night * DAY_S + number
            row = with_interval(made, rate, 0.4)
            named = replace(row, run=f"night-{night}", invocation_id=f"i{night}")
            rows.append(replace(named, recorded_at=at, started_at=at - 60, ended_at=at))
    return rows


def changed(found: Trends) -> dict[str, list[tuple[int, float]]]:
    return {
        one.label: [(change.at, round(change.ratio, 1)) for change in one.changes]
        for one in found.changed
    }


def test_a_change_is_found_where_it_is_and_noise_is_not_one() -> None:
    """One of twelve jobs is 10 % slower from the sixth night on, in each of twenty histories; of
    the other jobs hardly any is called changed."""
    exact, false = 0, 0
    for seed in range(20):
        found = trends_of(nights(seed, slower={3: 0.9}))
        assert len(found.nights) == 8 and len(found.trends) == 12 and found.noise < 0.03
        told = changed(found)
        exact += told.get("b=4") == [(5, 0.9)]
        false += len(told.keys() - {"b=4"})
    assert exact >= 17 and false <= 20 * 11 * 0.03


def test_what_all_jobs_share_is_found_too() -> None:
    found = trends_of(nights(1, slower=dict.fromkeys(range(12), 0.9)))
    assert len(found.changed) == 12 and found.noise < 0.03


@pytest.mark.parametrize(("jobs", "learnt"), [(7, False), (8, True)])
def test_the_noise_of_nights_is_learnt_from_eight_steps_on(jobs: int, learnt: bool) -> None:
    """A step leads from one night to the next; with fewer the noise is assumed."""
    found = trends_of(nights(4, jobs=jobs, count=2, slower={}))
    assert (found.noise != ASSUMED_NOISE) is learnt


def test_flagged_failed_and_single_rows_have_no_trend() -> None:
    rows = nights(2, jobs=2, count=2, slower={})
    failed = [replace(row, state=State.FAILED) for row in rows if row.batch_size == 1]
    disturbed = [
        replace(row, processor_wait_share=0.5, processor_cores=0.5)
        for row in rows
        if row.batch_size == 2
    ]
    assert trends_of([*failed, *disturbed]).trends == ()
    assert trends_of(rows[:1]).single == 1


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for row in nights(3, jobs=2, count=6, noise=0.002, slower={1: 0.7}):
        with Store(tmp_path, row.run) as store:
            store.append(row)
    return tmp_path


def test_one_page_over_all_runs(results: Path, nightgrid: Nightgrid) -> None:
    out = nightgrid("report", "--all", "--results", results).out
    headline = "1 of 2 jobs changed over 6 nights: b=2 is 0.70× since night-5."
    assert headline in out and out.rstrip().endswith(str(results / "report.html"))
    page = (results / "report.html").read_text(encoding="utf-8")
    assert f"<h1>{headline}</h1>" in page and page.count('class="curve spark"') == 2
    assert all(f"night-{n}" in page for n in range(6)) and "<script" not in page
    nightgrid("report", "night-5", "--all", "--results", results, code=4)


def test_the_notice_says_what_changed_since_the_last_run(results: Path) -> None:
    store = Store.existing(results, "night-5")
    found = since_last(store)
    assert found is not None and found.before == "night-4"
    assert since_text(found) == "Since night-4: 1 slower (b=2 0.70×), 1 unchanged."
    notice = Notice(
        run="night-5", ending=Ending.FINISHED, reason="", exit_code=0, host="head", since=found
    )
    values = notice.values()
    assert values["since"]["run"] == "night-4"
    assert (values["since"]["slower"], values["since"]["unchanged"]) == (1, 1)
    (row, *_) = store.read().measurements
    later = replace(row, invocation_id="again", recorded_at=START + 9 * DAY_S)
    with store:
        store.append(later)
    again = since_last(store)
    assert again is not None and again.before == "night-5, earlier"
    with Store(results / "alone", "first") as alone:
        alone.append(row)
    assert since_last(Store.existing(results / "alone", "first")) is None
