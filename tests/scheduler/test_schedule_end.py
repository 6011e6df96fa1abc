"""The search for the largest batch size, the circuit breaker, and how a run ends."""

from __future__ import annotations

import pytest
from schedule_cases import (
    Cluster,
    busy_cluster,
    cluster_of,
    job,
    kinds,
    node,
    nodes,
    numbered,
    planned,
    result_of,
)

from orchestrator.core.events import RunAttempt
from orchestrator.core.job import MAX, State
from orchestrator.core.outcome import Attempt, Failure, FailureClass
from orchestrator.core.plan import Action, PlannedJob


def play_search(cluster: Cluster, fits: int) -> list[tuple[str, object]]:
    """Answer probes until the run ends; returns what ran."""

    def end(attempt: Attempt) -> State:
        return State.SUCCEEDED if int(attempt.job.batch_size) <= fits else State.OUT_OF_MEMORY

    ran = cluster.play_out(end, took=1)
    return [(attempt.purpose, attempt.job.batch_size) for attempt in ran]


@pytest.mark.parametrize("cards", [1, 2])
def test_max_probes_and_then_measures_the_largest_that_fits(cards: int) -> None:
    cluster = cluster_of(job(batch_size=MAX, cards=cards))
    probes = [("probe", size) for size in (1, 2, 4, 8, 6, 5)]
    assert play_search(cluster, fits=5) == [*probes, ("measure", 5)]
    assert [row.final for row in cluster.rows] == [False] * 6 + [True]
    last = cluster.rows[-1]
    assert last.job.batch_size == MAX
    assert last.attempt is not None and last.attempt.job.batch_size == 5
    assert len({row.attempt.attempt_id for row in cluster.rows if row.attempt}) == 7
    workers = [c.worker_ids for c in cluster.log if isinstance(c, RunAttempt)]
    assert len(set(workers[:-1])) == (1 if cards == 1 else 6)
    assert workers[-1] != workers[0], "an allocator that has run dry is not good enough to measure"


def test_the_row_says_why_the_search_stopped() -> None:
    reasons = []
    for wish in (MAX, "max(cap=2)"):
        cluster = cluster_of(job(batch_size=wish))
        play_search(cluster, fits=3)
        reasons.append(cluster.finals()["a"].reason)
    assert reasons[0] == "measured; batch size 3 fits and 4 does not (4 probes)"
    assert "batch size 2 is the cap of the search" in reasons[1]


def test_best_times_trials_and_then_measures_the_fastest_anew() -> None:
    wanted = job(batch_size="best(cap=64)")
    cluster = busy_cluster(wanted)
    ran = []
    while cluster.finished is None and len(ran) < 20:
        if not cluster.running:
            cluster.stopped()
            continue
        attempt = cluster.only()
        size = int(attempt.job.batch_size)
        ran.append((attempt.purpose, size))
        roughly = attempt.job.measure.time_limit_s < wanted.measure.time_limit_s
        assert roughly == (attempt.purpose == "trial")
        cluster.ends(attempt, result=result_of(size, rate=100.0 - abs(size - 16)))
    trials = [size for purpose, size in ran if purpose == "trial"]
    assert ran == [*(("trial", size) for size in trials), ("measure", 16)]
    assert len(trials) <= 5 and len(set(trials)) == len(trials)
    last = cluster.rows[-1]
    assert last.final and last.reason.startswith("measured; batch size 16 is the fastest of")
    assert [row.final for row in cluster.rows] == [False] * len(trials) + [True]
    assert f"batch size {trials[0]} gives" in cluster.rows[0].reason


def test_without_a_failure_the_measurement_stays_on_the_warm_worker() -> None:
    cluster = cluster_of(job(batch_size="max(cap=4)"))
    play_search(cluster, fits=99)
    assert len({c.worker_ids for c in cluster.log if isinstance(c, RunAttempt)}) == 1


def test_max_ends_out_of_memory_when_nothing_fits() -> None:
    cluster = busy_cluster(job(batch_size=MAX), job("next"), cards=1)
    while cluster.only().job.dataset == "next":
        cluster.ends(cluster.only())
    cluster.ends(cluster.only(), State.OUT_OF_MEMORY)
    row = cluster.finals()["a"]
    assert (row.state, row.attempt) == (State.OUT_OF_MEMORY, None)
    assert cluster.stopping  # the worker is not trusted any more
    cluster.play_out()


def test_a_search_whose_worker_dies_goes_on_elsewhere() -> None:
    cluster = busy_cluster(job(batch_size=MAX))
    cluster.ends(cluster.only())
    assert cluster.only().job.batch_size == 2
    cluster.ends(cluster.only(), State.FAILED, FailureClass.CRASH)
    cluster.tick(5)
    cluster.stopped()
    cluster.ready()
    assert (cluster.only().purpose, cluster.only().job.batch_size) == ("probe", 2)
    play_search(cluster, fits=2)
    assert cluster.finals()["a"].state is State.SUCCEEDED


def test_a_measurement_that_does_not_fit_after_all_tries_smaller() -> None:
    cluster = busy_cluster(job(batch_size="max(cap=8)"))
    while cluster.only().purpose == "probe":
        cluster.ends(cluster.only())
    assert cluster.only().job.batch_size == 8
    cluster.ends(cluster.only(), State.OUT_OF_MEMORY)
    play_search(cluster, fits=6)
    last = cluster.finals()["a"].attempt
    assert last is not None and last.job.batch_size == 6


def test_the_breaker_stops_a_run_in_which_everything_fails_at_once() -> None:
    cluster = busy_cluster(*numbered(100), breaker_failures=3)
    for run in list(cluster.running.values())[:3]:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)
    cluster.play_out()
    not_started = [row for row in cluster.rows if row.state is State.NOT_STARTED]
    assert len(not_started) >= 90
    assert "circuit breaker" in not_started[0].reason and "crash" in not_started[0].reason


def test_a_burst_of_kills_does_not_trip_the_breaker_of_a_driver_started_again() -> None:
    """Jobs have succeeded under the driver before it: the surroundings are sound."""
    jobs = planned(*numbered(20))
    cluster = busy_cluster(*jobs, breaker_failures=3, card_failures=99, succeeded_before=True)
    for run in list(cluster.running.values())[:3]:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


def test_the_breaker_trips_when_no_worker_starts() -> None:
    failure = Failure(FailureClass.IMPORT, "no module named torch")
    cluster = cluster_of(*numbered(100), breaker_failures=4)
    cluster.stopped(*list(cluster.starting)[:4], failure=failure)
    assert {row.state for row in cluster.rows} == {State.NOT_STARTED}
    assert "no module named torch" in cluster.rows[0].reason
    cluster.play_out()


def test_workers_that_did_not_start_because_their_node_was_lost_do_not_trip_the_breaker() -> None:
    failure = Failure(FailureClass.NODE_LOST, "its spawner ended")
    jobs = planned(*numbered(20))
    cluster = cluster_of(*jobs, breaker_failures=4, card_failures=1)
    cluster.stopped(*list(cluster.starting), failure=failure)
    assert cluster.finished is None
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


def test_the_breaker_trips_when_every_gang_has_a_worker_that_does_not_start() -> None:
    """Those that are stopped with their gangs say nothing: the failed ones count in their order."""
    failure = Failure(FailureClass.IMPORT, "no module named torch")
    cluster = cluster_of(
        *numbered(50, cards=2), on=[node(f"n{n}", cards=2) for n in range(6)], breaker_failures=4
    )
    last_ranks = [each for each, start in cluster.starting.items() if start.rank == 1]
    cluster.stopped(*last_ranks[:3], failure=failure)
    assert not any(row.state is State.NOT_STARTED for row in cluster.rows)
    cluster.stopped(last_ranks[3], failure=failure)
    assert len([row for row in cluster.rows if row.state is State.NOT_STARTED]) == 50
    cluster.play_out()


def test_workers_that_were_lost_while_starting_do_not_keep_the_breaker_waiting() -> None:
    failure = Failure(FailureClass.IMPORT, "no module named torch")
    cluster = cluster_of(*numbered(100), on=nodes(2), breaker_failures=4)
    cluster.leave("n1")
    cluster.stopped(*list(cluster.starting)[:4], failure=failure)
    assert {row.state for row in cluster.rows} == {State.NOT_STARTED}
    cluster.play_out()


def test_attempts_that_were_lost_with_their_node_do_not_trip_the_breaker() -> None:
    cluster = cluster_of(*numbered(20), on=nodes(2, cards=4), breaker_failures=4)
    cluster.ready(*[each for each, start in cluster.starting.items() if start.card.node_id == "n1"])
    assert len(cluster.running) == 4
    cluster.leave("n1")
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


def test_workers_that_die_late_do_not_trip_the_breaker() -> None:
    """How long their attempts had run is known though no worker is left to tell it; the rows have
    it, too."""
    cluster = busy_cluster(*numbered(20), cards=4, breaker_failures=4)
    cluster.tick(3600.0)
    cluster.stopped(*list(cluster.up))
    assert State.NOT_STARTED not in {row.state for row in cluster.rows}
    [ranks] = {row.outcome.ranks for row in cluster.rows if row.outcome is not None}
    assert ranks[0].ended_at - ranks[0].started_at == 3600.0
    cluster.play_out()


@pytest.mark.parametrize(
    ("state", "failure_class", "took"),
    [
        (State.SUCCEEDED, None, 1.0),
        (State.FAILED, FailureClass.BAD_CONFIGURATION, 1.0),
        (State.FAILED, FailureClass.CRASH, 1000.0),
    ],
    ids=["a success", "a fault of the job", "a slow failure"],
)
def test_the_breaker_is_disarmed_by(
    state: State, failure_class: FailureClass | None, took: float
) -> None:
    cluster = busy_cluster(*numbered(30), breaker_failures=3)
    first, *others = list(cluster.running.values())
    cluster.ends(first.attempt, state, failure_class, took=took)
    for run in others:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)
    assert State.NOT_STARTED not in {row.state for row in cluster.rows}
    cluster.play_out()


def test_a_few_that_fail_first_among_many_do_not_trip_the_breaker() -> None:
    cluster = busy_cluster(*numbered(30), breaker_failures=3)
    for run in list(cluster.running.values())[-3:]:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)
    assert State.NOT_STARTED not in {row.state for row in cluster.rows}
    cluster.play_out()


def test_one_job_that_keeps_failing_does_not_trip_the_breaker() -> None:
    cluster = cluster_of(job("poison"), breaker_failures=2)
    cluster.play_out(State.FAILED)
    assert cluster.finals()["poison"].state is State.FAILED


def test_after_a_stop_request_what_runs_is_finished_and_the_rest_not_started() -> None:
    cluster = busy_cluster(job("a"), job("b"), job("c"), cards=1)
    running = cluster.only().job.dataset
    cluster.stop_request("SIGTERM")
    states = {name: row.state for name, row in cluster.finals().items()}
    assert states == {n: State.NOT_STARTED for n in "abc" if n != running}
    cluster.ends(cluster.only())
    assert cluster.finals()[running].state is State.SUCCEEDED
    cluster.stopped()
    assert cluster.finished is not None and cluster.finished.reason == "SIGTERM"


@pytest.mark.parametrize("cards", [1, 2])
def test_after_a_stop_request_what_waits_for_a_cpu_slot_is_not_started(cards: int) -> None:
    cluster = busy_cluster(job("a", cards=cards))
    worker_ids = tuple(cluster.up)
    assert not any(kinds(cluster.queued(*worker_ids)))
    cluster.stop_request("SIGTERM")
    assert kinds(cluster.queued(*worker_ids, *worker_ids)) == ["StopWorker"] * cards
    cluster.ends(cluster.only(), State.LOST, FailureClass.NODE_LOST)
    row = cluster.finals()["a"]
    assert (row.state, row.reason) == (State.NOT_STARTED, "SIGTERM")
    assert row.attempt is not None and row.outcome is not None and row.outcome.failure is None
    cluster.stopped()
    assert cluster.finished is not None


def test_a_job_that_ends_while_it_is_stopped_in_the_queue_has_its_row() -> None:
    cluster = busy_cluster(job("a"))
    cluster.stop_request()
    cluster.queued(*cluster.up)
    cluster.ends(cluster.only())
    assert cluster.finals()["a"].state is State.SUCCEEDED


def test_a_second_stop_request_stops_what_runs() -> None:
    cluster = busy_cluster(job("a"))
    assert not kinds(cluster.stop_request())
    assert kinds(cluster.stop_request()) == ["StopWorker"]
    cluster.ends(cluster.only(), State.LOST, FailureClass.NODE_LOST)
    assert cluster.finals()["a"].state is State.LOST
    cluster.stopped()
    assert cluster.finished is not None


def test_a_stop_request_may_stop_what_runs_at_once() -> None:
    cluster = busy_cluster(job("a"), finish_running=False)
    assert kinds(cluster.stop_request()) == ["StopWorker"]
    cluster.stopped()
    assert cluster.finals()["a"].state is State.LOST
    assert cluster.finished is not None


def test_a_gathering_gang_is_let_go_by_a_stop_request() -> None:
    cluster = cluster_of(job("gang", cards=8))
    cluster.stop_request()
    assert len(cluster.stopping) == 8
    cluster.stopped()
    assert not cluster.starting
    assert cluster.finished is not None


def test_the_run_is_finished_once_when_every_worker_is_stopped() -> None:
    cluster = busy_cluster(job("a"), job("b"))
    for run in list(cluster.running.values()):
        cluster.ends(run.attempt)
    assert cluster.finished is None and len(cluster.stopping) == 2
    first, second = cluster.stopping
    assert kinds(cluster.stopped(first)) == []
    assert kinds(cluster.stopped(second)) == ["RunFinished"]
    assert cluster.tick(10) == [] and cluster.stop_request() == []


def test_counts_add_up_at_every_step() -> None:
    jobs = [*planned(*numbered(10))]
    jobs.append(PlannedJob(job=job("no"), action=Action.UNSUPPORTED, reason="no"))
    cluster = Cluster(jobs)
    assert cluster.schedule.counts()[State.PENDING] == 11
    cluster.join(node(cards=4))
    cluster.ready()
    counts = cluster.schedule.counts()
    assert (counts[State.RUNNING], counts[State.PENDING], counts[State.UNSUPPORTED]) == (4, 6, 1)
    cluster.play_out()
    assert cluster.schedule.counts()[State.SUCCEEDED] == 10
    assert sum(cluster.schedule.counts().values()) == 11
