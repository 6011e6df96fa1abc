"""Short jobs given to a busy worker ahead: begun after a success, given back after all else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import Cluster, Fixed, job, node, planned

from orchestrator.core.events import AttemptEnded, RecordRow, RunAttempt, StopWorker
from orchestrator.core.job import State
from orchestrator.core.outcome import FailureClass, Outcome
from orchestrator.scheduling.ahead import (
    ANSWER_S,
    MOST_AHEAD,
    Pace,
    may_have_more,
    may_wait_behind,
)
from orchestrator.scheduling.estimate import Estimate
from orchestrator.scheduling.schedule import ScheduleSettings
from orchestrator.scheduling.simulate import SimulationSettings, simulate
from orchestrator.worker.card_process import KEEP_S

SHORT_S = 0.01
seconds = st.floats(0, 1e4)


@given(
    next_s=seconds,
    ahead_s=st.lists(seconds, max_size=10),
    took_s=seconds,
    most_s=st.floats(0, 10),
    left=st.integers(1, 500),
    workers=st.integers(1, 64),
)
def test_what_waits_is_short_few_and_no_more_than_a_share_or_a_moment(
    next_s: float,
    ahead_s: Sequence[float],
    took_s: float,
    most_s: float,
    left: int,
    workers: int,
) -> None:
    """Given one after the other for as long as the rule allows."""
    given_s, pace = list(ahead_s), Pace(took_s, 1.0)
    while may_have_more(given_s, pace, left=left, workers=workers) and may_wait_behind(
        next_s, given_s, pace, most_s=most_s
    ):
        left -= 1
        before_s = pace.expected_together_s(given_s)
        given_s.append(next_s)
        expected_s = sum(map(pace.expected_s, given_s))
        assert expected_s <= most_s * (1 + 1e-9) and len(given_s) <= MOST_AHEAD and left >= 0
        assert left >= (len(given_s) - 1) * workers or before_s < ANSWER_S


def test_the_last_short_jobs_are_not_shared_out_one_by_one() -> None:
    """An answer of the driver takes as long as many of them; of longer ones each worker has its
    share."""
    for took_s, most in ((ANSWER_S / 100, MOST_AHEAD), (ANSWER_S / 4, 4), (ANSWER_S, 2)):
        given_s: list[float] = []
        while may_have_more(given_s, Pace(took_s, 1.0), left=40 - len(given_s), workers=32):
            given_s.append(1.0)
        assert len(given_s) == most
    assert not may_have_more([], Pace(0.0, 1.0), left=0, workers=32)


@given(took_s=seconds, estimated_s=st.floats(1e-6, 1e4), next_s=seconds)
def test_a_job_is_expected_to_take_no_less_than_the_last(
    took_s: float, estimated_s: float, next_s: float
) -> None:
    """And in proportion where its estimate is longer."""
    expected_s = Pace(took_s, estimated_s).expected_s(next_s)
    assert expected_s >= took_s
    if next_s > estimated_s:
        assert expected_s == pytest.approx(took_s * next_s / estimated_s)


@given(
    lengths=st.lists(st.sampled_from([0.001, 0.01, 0.03, 0.2, 3.0]), min_size=1, max_size=80),
    cards=st.integers(1, 8),
    ahead_s=st.sampled_from([0.02, 0.1]),
)
def test_a_job_given_early_makes_no_run_longer_than_what_may_wait(
    lengths: list[float], cards: int, ahead_s: float
) -> None:
    """Short jobs among long ones, on workers that come up at different times."""
    jobs = planned(*(job(str(n)) for n in range(len(lengths))))
    estimates = Fixed(load_s=0.0, by_name={str(n): each for n, each in enumerate(lengths)})

    def lasts_s(how: ScheduleSettings) -> float:
        how_it_is = SimulationSettings(noise=0.0, start_s=1.0)
        nodes = [node(cards=cards)]
        return simulate(
            jobs, nodes, estimates, settings=how_it_is, schedule_settings=how
        ).makespan_s

    assert lasts_s(ScheduleSettings(ahead_s=ahead_s)) <= lasts_s(ScheduleSettings()) + ahead_s


# ------------------------------------------------------------ what becomes of it


def busy(count: int = 6, **settings: object) -> Cluster:
    """One card, whose worker has run one short job and been given all the others."""
    jobs = planned(*(job(str(n)) for n in range(count)))
    cluster = Cluster(jobs, estimates=Fixed(SHORT_S, 0.0), ahead_s=0.1, **settings)
    cluster.join(node(cards=1))
    cluster.ready()
    cluster.ends(cluster.only(), took=SHORT_S)
    return cluster


def given_ahead(cluster: Cluster) -> list[RunAttempt]:
    """The attempts that were given and have not ended, in order."""
    return list(cluster.running.values())


def test_a_short_job_is_followed_by_more_and_each_ends_in_its_place() -> None:
    """The first job tells how long they take; from then on the worker has its next ones."""
    cluster = busy()
    first, *others = given_ahead(cluster)
    assert first.after == ""
    assert [each.after for each in others] == [
        each.attempt.attempt_id for each in given_ahead(cluster)[:-1]
    ]
    assert len(others) == 2  # a half of what is left
    while cluster.running:
        cluster.ends(given_ahead(cluster)[0].attempt, took=SHORT_S)
    cluster.stopped()
    assert cluster.finished is not None
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}
    assert len(cluster.rows) == 6


def test_a_long_job_is_followed_by_nothing() -> None:
    """Only what the driver's answer is long beside."""
    cluster = Cluster(planned(*(job(str(n)) for n in range(9))), ahead_s=0.1)
    cluster.join(node(cards=1))
    cluster.ready()
    cluster.ends(cluster.only(), took=0.2)
    assert len(given_ahead(cluster)) == 1


@pytest.mark.parametrize(
    ("state", "failure_class"),
    [(State.FAILED, FailureClass.CRASH), (State.UNSUPPORTED, FailureClass.UNSUPPORTED)],
)
def test_what_is_behind_a_failure_is_neither_blamed_nor_lost(
    state: State, failure_class: FailureClass
) -> None:
    """Its rows say that it never began; the jobs wait for a card as if nothing had been."""
    cluster = busy()
    runs = given_ahead(cluster)
    commands = cluster.ends(runs[0].attempt, state, failure_class, took=SHORT_S)
    rows = [each for each in commands if isinstance(each, RecordRow)]
    assert [row.attempt for row in rows] == [run.attempt for run in runs]
    assert all(row.state is State.LOST and not row.final for row in rows[1:])
    assert all("had not begun" in row.reason for row in rows[1:])
    for run in runs[1:]:
        del cluster.running[run.attempt.attempt_id]
    cluster.play_out()
    for name, row in cluster.finals().items():
        if name != runs[0].attempt.job.dataset:
            assert row.state is State.SUCCEEDED and row.attempt is not None
            assert row.attempt.number <= 2


@pytest.mark.parametrize("stops", [False, True])
def test_what_is_behind_an_out_of_memory_is_pruned_once(*, stops: bool) -> None:
    """Larger batches of the same configuration lie behind one that does not fit: each has its row
    for being given back, and one final row."""
    jobs = planned(*(job("x", batch_size=2**n) for n in range(7)))
    cluster = Cluster(jobs, estimates=Fixed(SHORT_S, 0.0), ahead_s=0.1)
    cluster.join(node(cards=1))
    cluster.ready()
    cluster.ends(cluster.only(), took=SHORT_S)
    runs = given_ahead(cluster)
    assert len(runs) > 2
    if stops:
        cluster.stop_request()
    cluster.running.clear()
    cluster.ends(runs[0].attempt, State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY, took=SHORT_S)
    cluster.play_out()
    final = {row.job.batch_size: row.state for row in cluster.rows if row.final}
    given_back = {run.attempt.job.batch_size for run in runs[1:]}
    assert final[1] is State.SUCCEEDED and final[2] is State.OUT_OF_MEMORY
    assert {final[size] for size in given_back} == {State.NOT_STARTED if stops else State.PRUNED}
    assert len(final) == len([row for row in cluster.rows if row.final]) == 7


def test_what_waits_behind_a_job_that_takes_too_long_goes_to_other_cards() -> None:
    """Estimates that are all alike, and a few long jobs behind many short ones: the run takes
    hardly longer than without anything given ahead."""
    true_s = {str(n): 300.0 if 8 <= n < 15 else 0.02 for n in range(100)}
    jobs = planned(*(job(str(n)) for n in range(100)))

    def lasts_s(ahead_s: float) -> float:
        return simulate(
            jobs,
            [node()],
            Fixed(60.0, 0.0),
            settings=SimulationSettings(noise=0.0, keep_ahead_s=KEEP_S),
            schedule_settings=ScheduleSettings(ahead_s=ahead_s),
            truth=lambda job: Estimate(load_s=0.0, run_s=true_s[job.dataset]),
        ).makespan_s

    assert lasts_s(0.1) <= lasts_s(0.0) + 2 * KEEP_S


def test_a_stop_gives_back_what_has_waited_for_too_long() -> None:
    """It counts as not started, since it never began."""
    cluster = busy()
    cluster.stop_request()
    runs = given_ahead(cluster)
    unbegun = Outcome.of_unbegun(runs[1].attempt.attempt_id)
    cluster.see(AttemptEnded(at=cluster.now, outcome=unbegun))
    for run in runs[1:]:
        del cluster.running[run.attempt.attempt_id]
    cluster.play_out()
    names = {run.attempt.job.dataset for run in runs[1:]}
    assert {cluster.finals()[name].state for name in names} == {State.NOT_STARTED}


def test_a_lost_node_gives_back_what_had_not_begun() -> None:
    """One attempt is lost with it, the others only wait again."""
    cluster = busy()
    runs = given_ahead(cluster)
    cluster.leave("n1")
    lost = [row.reason for row in cluster.rows if row.state is State.LOST]
    assert len(lost) == len(runs) and sum("had not begun" in each for each in lost) == len(lost) - 1
    cluster.join(node("n2", cards=1))
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_a_quarantined_card_begins_nothing_more() -> None:
    """Its worker is stopped at the end of what runs. A stop that crosses that end blames nobody."""
    cluster = busy()
    runs = given_ahead(cluster)
    [pool] = cluster.schedule.pools.values()
    slot = pool.cards.slot(runs[0].attempt.cards[0])
    assert slot is not None
    pool.cards.quarantine(slot, "others of its node failed")
    commands = cluster.ends(runs[0].attempt, took=SHORT_S)
    assert [type(each) for each in commands if isinstance(each, StopWorker)] == [StopWorker]
    for run in runs[1:]:
        cluster.ends(run.attempt, State.LOST, FailureClass.HANG, took=0.0)
    rows = [row for row in cluster.rows if row.attempt in [run.attempt for run in runs[1:]]]
    assert len(rows) == len(runs) - 1 and all("given back" in row.reason for row in rows)
    cluster.stopped()
    pool.cards.release(slot)
    cluster.tick(1.0)
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_an_orderly_stop_lets_what_was_given_end() -> None:
    """The worker is stopped behind the last of it, and nothing else begins."""
    cluster = busy(20)
    cluster.stop_request()
    runs = given_ahead(cluster)
    assert len(runs) > 5
    for run in runs:
        assert not cluster.stopping
        commands = cluster.ends(run.attempt, took=SHORT_S)
        assert not any(isinstance(each, RunAttempt) for each in commands)
    assert any(isinstance(each, StopWorker) for each in commands)
    cluster.stopped()
    assert cluster.finished is not None


def test_nothing_is_given_ahead_while_a_gang_waits() -> None:
    """It would hold up the cards that are drained for the gang."""
    jobs = planned(*(job(str(n)) for n in range(8)), job("wide", cards=2))
    cluster = Cluster(jobs, estimates=Fixed(SHORT_S, 0.0), ahead_s=0.1)
    cluster.join(node(cards=1))
    cluster.ready()
    cluster.ends(cluster.only(), took=SHORT_S)
    assert [run.after for run in given_ahead(cluster)] == [""]


def test_a_refused_attempt_takes_what_is_behind_it_along() -> None:
    """One that could not be handed over has ended before its turn: those after it would wait for
    ever. The one that runs is not touched."""
    cluster = busy()
    runs = given_ahead(cluster)
    cluster.ends(runs[2].attempt, State.LOST, FailureClass.NODE_LOST, took=0.0)
    assert not cluster.stopping
    for run in runs[3:]:
        del cluster.running[run.attempt.attempt_id]
    names = [run.attempt.job.dataset for run in runs[:2]]
    for run in runs[:2]:
        cluster.ends(run.attempt, took=SHORT_S)
    assert all(cluster.finals()[name].state is State.SUCCEEDED for name in names)
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_ends_of_one_moment_give_their_cards_out_once() -> None:
    """After each but the last only the row is decided; then every worker has its next jobs."""
    jobs = planned(*(job(str(n)) for n in range(40)))
    cluster = Cluster(jobs, estimates=Fixed(SHORT_S, 0.0), ahead_s=0.1)
    cluster.join(node(cards=2))
    cluster.ready()
    first, second = given_ahead(cluster)
    alone = cluster.ends(first.attempt, took=SHORT_S, more=True)
    assert [type(each) for each in alone] == [RecordRow]
    together = cluster.ends(second.attempt, took=0.0)
    next_ones = [each for each in together if isinstance(each, RunAttempt) and not each.after]
    assert {each.worker_ids for each in next_ones} == {first.worker_ids, second.worker_ids}
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_a_failure_is_dealt_with_before_the_next_event() -> None:
    """What is behind it waits again, and its worker is stopped or has its next job."""
    cluster = busy(20)
    [first, *_] = given_ahead(cluster)
    commands = cluster.ends(first.attempt, State.FAILED, FailureClass.CRASH, took=0.0, more=True)
    assert any(isinstance(each, RunAttempt | StopWorker) for each in commands)


def test_the_last_of_several_ends_closes_the_run() -> None:
    """That the events before it were only noted keeps nothing open."""
    cluster = busy(6)
    while runs := given_ahead(cluster):
        for run in runs:
            cluster.ends(run.attempt, took=SHORT_S, more=run is not runs[-1])
    cluster.stopped()
    assert cluster.finished is not None and len(cluster.finals()) == 6


@given(
    together=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    failures=st.sets(st.integers(0, 30), max_size=3),
    cards=st.integers(1, 4),
)
def test_ends_told_in_moments_of_any_size_end_every_job(
    together: list[int], failures: set[int], cards: int
) -> None:
    """Some of them failures that are tried again; the invariants hold at every step."""
    jobs = planned(*(job(str(n)) for n in range(24)))
    cluster = Cluster(jobs, estimates=Fixed(SHORT_S, 0.0), ahead_s=0.1)
    cluster.join(node(cards=cards))
    cluster.ready()
    seen = 0
    for size in together:
        heads = [run for run in given_ahead(cluster) if run.after not in cluster.running][:size]
        for run in heads:
            kind = FailureClass.CRASH if seen in failures else None
            state = State.FAILED if kind else State.SUCCEEDED
            cluster.ends(run.attempt, state, kind, took=SHORT_S, more=run is not heads[-1])
            seen += 1
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}
