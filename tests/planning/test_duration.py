"""Range of a run's duration: what is known of its start, its jobs and its cards."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from core_cases import a_past_row
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import job, node, planned

from orchestrator.core.job import MAX, Accelerator, Job
from orchestrator.core.plan import PastRow, Span
from orchestrator.core.topology import Node, parse_emulation
from orchestrator.planning.forecast import (
    CLUSTER,
    FIRST_USE,
    IN_PROCESS,
    PRIVATE,
    START_FACTOR,
    Startup,
    duration,
    most_repeats,
    work,
)
from orchestrator.scheduler.estimator import Estimator

REAL = node(cards=1, emulated=False)


past = partial(a_past_row, emulated=False)


def knowing(*rows: PastRow) -> Estimator:
    """An estimator as a plan's duration has it."""
    return Estimator.from_history(rows, queued=False)


def test_cards_share_the_work_and_nothing_is_faster_than_its_longest_job() -> None:
    jobs = [job(f"j{number}", batch_size=number + 1) for number in range(4)]
    estimator = knowing(*(past(each, 100.0, load_s=0.001) for each in jobs))
    for cards, seconds in ((1, 400.0), (4, 100.0), (40, 100.0)):
        span = work(planned(*jobs), [node(cards=cards, emulated=False)], estimator, 2)
        assert span.middle_s == pytest.approx(seconds, rel=0.01)


def test_emulated_cards_are_worth_as_many_as_have_a_turn() -> None:
    jobs = [job(f"j{number}", batch_size=number + 1) for number in range(16)]
    estimator = knowing(*(past(each, 10.0, load_s=0.001) for each in jobs))
    nodes = [node(cards=16, emulated=True)]
    assert work(planned(*jobs), nodes, estimator, 2).middle_s == pytest.approx(160, rel=0.01)
    assert work(planned(*jobs), nodes, estimator, 9).middle_s == pytest.approx(20, rel=0.01)


def test_waiting_for_a_turn_is_no_part_of_a_jobs_own_time() -> None:
    this = job("x")
    span = work(planned(this), [REAL], knowing(past(this, 100.0, queued_s=90.0)), 2)
    assert span.low_s < 10.0 < span.high_s < 90.0


def test_what_is_known_makes_the_range_narrower() -> None:
    this = job("x")
    other = job("x", precision="int8")
    histories = (
        [],
        [past(other, 20.0)],
        [past(this, 20.0)],
        [past(this, 20.0 + number % 2) for number in range(60)],
    )
    widths = []
    for rows in histories:
        run, _ = knowing(*rows).guess(this)
        widths.append(run.high_s / run.low_s)
    assert sorted(widths, reverse=True) == widths and widths[-1] <= 4


def test_the_start_is_learnt_from_earlier_ones_and_stands_before_the_work() -> None:
    assert Startup(kind=PRIVATE).span(16).middle_s > Startup(kind=PRIVATE).span(1).middle_s
    assert Startup(kind=IN_PROCESS).span(1).high_s < Startup(kind=CLUSTER).span(1).high_s
    known = Startup(kind=PRIVATE, earlier_s=(30.0, 90.0, 40.0)).span(16)
    assert (known.middle_s, known.high_s) == (40.0, 120.0) and known.low_s < 30.0
    jobs = planned(job("x"))
    whole = duration(jobs, [REAL], Estimator(), Startup(earlier_s=(40.0,)))
    assert whole.middle_s == 40.0 + work(jobs, [REAL], Estimator(), 1).middle_s


def test_the_first_job_of_a_process_pays_for_its_imports() -> None:
    for kind, more_s in ((IN_PROCESS, FIRST_USE.high_s), (PRIVATE, 0.0), (CLUSTER, 0.0)):
        assert Startup(kind=kind, earlier_s=(5.0,)).span(1).high_s == 5.0 * START_FACTOR + more_s


def test_a_busy_host_makes_the_longest_time_longer_and_leaves_the_shortest() -> None:
    """Seven programs on two processors: twice the time for an eighth, unless they end; of the work
    on real cards, which are not theirs, only the start. Rows may have been measured beside as many:
    where they are known, the likeliest time is theirs."""
    jobs, quiet, busy = planned(job("x")), Startup(processors=2), Startup(processors=2, load=7.0)
    emulated = [node(cards=1, emulated=True)]
    alone, beside = (duration(jobs, emulated, Estimator(), each) for each in (quiet, busy))
    assert beside == alone.times(1, 2, 2)
    known = knowing(past(job("x"), 20.0))
    quiet, busy = (replace(each, earlier_s=(40.0,)) for each in (quiet, busy))
    alone, beside = (duration(jobs, emulated, known, each) for each in (quiet, busy))
    assert beside == alone.times(1, 1, 2)
    alone, beside = (duration(jobs, [REAL], Estimator(), each) for each in (quiet, busy))
    assert beside.high_s - alone.high_s == pytest.approx(quiet.span(1).high_s)


@given(
    batches=st.lists(st.one_of(st.integers(1, 64), st.just(MAX)), min_size=1, max_size=8),
    cards=st.integers(1, 16),
    emulated=st.booleans(),
    busy_s=st.one_of(st.none(), st.floats(0.1, 1e4)),
)
def test_a_range_is_in_order_and_grows_with_the_work_alone(
    batches: list[int | str], cards: int, emulated: bool, busy_s: float | None
) -> None:
    jobs = [job(f"j{number}", batch_size=size) for number, size in enumerate(batches)]
    rows = [] if busy_s is None else [past(job("known", batch_size=4), busy_s)]
    estimator = knowing(*rows)

    def span(count: int, of_cards: int) -> Span:
        nodes = [node(cards=of_cards, emulated=emulated)]
        return work(planned(*jobs[:count]), nodes, estimator, 4)

    whole = span(len(jobs), cards)
    assert 0 < whole.low_s <= whole.middle_s <= whole.high_s
    assert span(len(jobs) - 1, cards).high_s <= whole.high_s * (1 + 1e-9)
    assert span(len(jobs), cards + 1).low_s <= whole.low_s * (1 + 1e-9)


def test_repeats_of_flagged_rows_take_time_where_the_host_is_loaded() -> None:
    """Every row on its processors is flagged then; on real cards elsewhere some may be. Rows of
    emulated cards are not repeated."""
    once = job("x")
    quiet, loaded = Startup(processors=2), Startup(processors=2, load=7.0)
    (host,) = parse_emulation("1x1:CPU", [Accelerator.CPU])
    host = replace(host, emulated=False)

    def times(this: Job, on: Node, startup: Startup) -> tuple[float, float]:
        this = replace(this, accelerator=on.accelerator)
        known = knowing(past(this, 100.0, load_s=0.001))
        without = replace(this, measure=replace(this.measure, repeat_flagged=0))
        span = duration(planned(this), [on], known, startup)
        plain = duration(planned(without), [on], known, startup)
        assert most_repeats(planned(without), [on]) == 0 and span.low_s == plain.low_s
        return span.middle_s - plain.middle_s, span.high_s - plain.high_s

    assert most_repeats(planned(once), [REAL]) == 1
    assert times(once, REAL, quiet)[0] == times(once, REAL, loaded)[0] == 0.0
    assert times(once, REAL, quiet)[1] > 5.0
    assert times(once, host, loaded)[0] == pytest.approx(100.0, rel=0.2)
    emulated = node(cards=1, emulated=True)
    assert times(once, emulated, loaded) == (0.0, 0.0)
