"""The search for the largest batch size, the circuit breaker, and how a run ends."""

from __future__ import annotations

from collections.abc import Callable

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
    result_of,
)

from orchestrator.core.events import RunAttempt
from orchestrator.core.job import MAX, State
from orchestrator.core.outcome import Attempt, Failure, FailureClass


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


def test_workers_that_die_late_do_not_trip_the_breaker() -> None:
    """How long their attempts had run is known though no worker is left to tell it; the rows have
    it, too."""
    cluster = busy_cluster(*numbered(20), cards=4, breaker_failures=4)
    cluster.tick(3600.0)
    cluster.stopped(*list(cluster.up))
    assert {(row.state, row.final) for row in cluster.rows} == {(State.LOST, False)}
    [ranks] = {row.outcome.ranks for row in cluster.rows if row.outcome is not None}
    assert ranks[0].ended_at - ranks[0].started_at == 3600.0
    cluster.play_out()


Act = Callable[[Cluster], object]


def crash(cluster: Cluster, runs: slice) -> None:
    """Some of the attempts that run, in their order, end within a second."""
    for run in list(cluster.running.values())[runs]:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)


def first_ends(state: State, failure: FailureClass | None, took: float) -> Act:
    """The first ends so, and all others crash."""

    def act(cluster: Cluster) -> None:
        cluster.ends(next(iter(cluster.running.values())).attempt, state, failure, took=took)
        crash(cluster, slice(None))

    return act


HARMLESS: dict[str, tuple[Act, dict[str, object]]] = {
    "a success": (first_ends(State.SUCCEEDED, None, 1.0), {}),
    "a fault of the job": (first_ends(State.FAILED, FailureClass.BAD_CONFIGURATION, 1.0), {}),
    "a slow failure": (first_ends(State.FAILED, FailureClass.CRASH, 1000.0), {}),
    "a few that fail first among many": (lambda cluster: crash(cluster, slice(-3, None)), {}),
    "a burst of kills under a driver started again": (
        lambda cluster: crash(cluster, slice(3)),  # jobs have succeeded under the one before it
        {"succeeded_before": True, "card_failures": 99},
    ),
    "a lost node": (lambda cluster: cluster.leave("n1"), {}),
}


@pytest.mark.parametrize(("act", "settings"), HARMLESS.values(), ids=HARMLESS)
def test_the_breaker_is_not_tripped_by(act: Act, settings: dict[str, object]) -> None:
    cluster = busy_cluster(*numbered(30), on=nodes(2, cards=4), breaker_failures=3, **settings)
    act(cluster)
    cluster.play_out()
    assert State.NOT_STARTED not in {row.state for row in cluster.rows}


def test_workers_that_did_not_start_because_their_node_was_lost_do_not_trip_the_breaker() -> None:
    failure = Failure(FailureClass.NODE_LOST, "its spawner ended")
    cluster = cluster_of(*numbered(20), breaker_failures=4, card_failures=1)
    cluster.stopped(*list(cluster.starting), failure=failure)
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


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


@pytest.mark.parametrize(("finish_running", "requests"), [(True, 2), (False, 1)])
def test_a_second_stop_request_stops_what_runs_and_the_first_where_it_is_not_to_finish(
    finish_running: bool, requests: int
) -> None:
    cluster = busy_cluster(job("a"), finish_running=finish_running)
    for _ in range(requests - 1):
        assert not kinds(cluster.stop_request())
    assert kinds(cluster.stop_request()) == ["StopWorker"]
    cluster.stopped()
    assert cluster.finals()["a"].state is State.LOST
    assert cluster.finished is not None
