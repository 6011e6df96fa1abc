"""The search for the largest batch size, the circuit breaker, and how a run ends."""

from __future__ import annotations

import pytest
from schedule_cases import Cluster, job, kinds, node, planned, result_of

from orchestrator.core.events import RunAttempt
from orchestrator.core.job import MAX, Accelerator, State
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Card

# ------------------------------------------------------------ batch_size: max


def play_search(cluster: Cluster, fits: int) -> list[tuple[str, object]]:
    """Answer probes until the run ends; returns what ran."""
    ran = []
    for _ in range(200):
        if cluster.finished is not None:
            return ran
        if cluster.running:
            attempt = cluster.only()
            ran.append((attempt.purpose, attempt.job.batch_size))
            good = int(attempt.job.batch_size) <= fits
            cluster.ends(attempt, State.SUCCEEDED if good else State.OUT_OF_MEMORY, took=1)
        elif cluster.stopping:
            cluster.stopped()
        elif cluster.starting:
            cluster.ready()
    raise AssertionError("the search does not end")


def test_max_probes_and_then_measures_the_largest_that_fits() -> None:
    """Doubling, bisection, one measurement; only that row is final."""
    cluster = Cluster(planned(job(batch_size=MAX)))
    cluster.join(node())
    ran = play_search(cluster, fits=5)
    assert ran == [
        ("probe", 1),
        ("probe", 2),
        ("probe", 4),
        ("probe", 8),
        ("probe", 6),
        ("probe", 5),
        ("measure", 5),
    ]
    assert [row.final for row in cluster.rows] == [False] * 6 + [True]
    last = cluster.rows[-1]
    assert last.job.batch_size == MAX
    assert last.attempt is not None and last.attempt.job.batch_size == 5
    assert len({row.attempt.attempt_id for row in cluster.rows if row.attempt}) == 7


def test_the_row_says_why_the_search_stopped() -> None:
    """The next size that did not fit, or the cap and how to raise it."""
    reasons = []
    for wish in (MAX, "max(cap=2)"):
        cluster = Cluster(planned(job(batch_size=wish)))
        cluster.join(node())
        play_search(cluster, fits=3)
        reasons.append(cluster.finals()["a"].reason)
    assert reasons[0] == "measured; batch size 3 fits and 4 does not (4 probes)"
    assert "batch size 2 is the cap of the search" in reasons[1]


def test_best_times_trials_and_then_measures_the_fastest_anew() -> None:
    """Trials are timed roughly; the final row has the batch size that won and the grid's timing."""
    wanted = job(batch_size="best(cap=64)")
    cluster = Cluster(planned(wanted))
    cluster.join(node())
    cluster.ready()
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


def test_probes_share_a_worker_and_the_measurement_gets_a_clean_one() -> None:
    """An allocator that has run dry is good enough to probe, not to measure."""
    cluster = Cluster(planned(job(batch_size=MAX)))
    cluster.join(node())
    play_search(cluster, fits=5)
    workers = [c.worker_ids for c in cluster.log if isinstance(c, RunAttempt)]
    assert len(set(workers[:-1])) == 1
    assert workers[-1] != workers[0]


def test_without_a_failure_the_measurement_stays_on_the_warm_worker() -> None:
    """The cap is reached: nothing has spoilt the worker."""
    cluster = Cluster(planned(job(batch_size="max(cap=4)")))
    cluster.join(node())
    play_search(cluster, fits=99)
    assert len({c.worker_ids for c in cluster.log if isinstance(c, RunAttempt)}) == 1


def test_max_ends_out_of_memory_when_nothing_fits() -> None:
    """The final row is the job's, not the probe's."""
    cluster = Cluster(planned(job(batch_size=MAX), job("next")))
    cluster.join(node(cards=1))
    cluster.ready()
    while cluster.only().job.dataset == "next":
        cluster.ends(cluster.only())
    cluster.ends(cluster.only(), State.OUT_OF_MEMORY)
    row = cluster.finals()["a"]
    assert (row.state, row.attempt) == (State.OUT_OF_MEMORY, None)
    assert cluster.stopping  # the worker is not trusted any more
    cluster.play_out()


def test_a_search_whose_worker_dies_goes_on_elsewhere() -> None:
    """A crash is retried at the same batch size, with what is known so far."""
    cluster = Cluster(planned(job(batch_size=MAX)))
    cluster.join(node())
    cluster.ready()
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
    """The probe of 8 fitted, its measurement did not: the next smaller answer is measured."""
    cluster = Cluster(planned(job(batch_size="max(cap=8)")))
    cluster.join(node())
    cluster.ready()
    while cluster.only().purpose == "probe":
        cluster.ends(cluster.only())
    assert cluster.only().job.batch_size == 8
    cluster.ends(cluster.only(), State.OUT_OF_MEMORY)
    play_search(cluster, fits=6)
    last = cluster.finals()["a"].attempt
    assert last is not None and last.job.batch_size == 6


def test_a_gang_can_search_too() -> None:
    """Each probe is a gang of its own."""
    cluster = Cluster(planned(job(batch_size=MAX, cards=2)))
    cluster.join(node())
    for _ in range(100):
        if cluster.finished is not None:
            break
        cluster.ready()
        if cluster.running:
            attempt = cluster.only()
            good = int(attempt.job.batch_size) <= 3
            cluster.ends(attempt, State.SUCCEEDED if good else State.OUT_OF_MEMORY)
        cluster.stopped()
    last = cluster.finals()["a"].attempt
    assert last is not None and (last.purpose, last.job.batch_size) == ("measure", 3)


# ------------------------------------------------------------ the end


def test_the_breaker_stops_a_run_in_which_everything_fails_at_once() -> None:
    """The first attempts all crash within seconds: the rest is NOT_STARTED and says why."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(100)]), breaker_failures=3)
    cluster.join(node())
    cluster.ready()
    for run in list(cluster.running.values())[:3]:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)
    cluster.play_out()
    not_started = [row for row in cluster.rows if row.state is State.NOT_STARTED]
    assert len(not_started) >= 90
    assert "circuit breaker" in not_started[0].reason and "crash" in not_started[0].reason


def test_a_burst_of_kills_does_not_trip_the_breaker_of_a_driver_started_again() -> None:
    """Jobs have succeeded under the driver before it: the surroundings are sound."""
    jobs = planned(*[job(str(n)) for n in range(20)])
    cluster = Cluster(jobs, breaker_failures=3, card_failures=99, succeeded_before=True)
    cluster.join(node())
    cluster.ready()
    for run in list(cluster.running.values())[:3]:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_the_breaker_trips_when_no_worker_starts() -> None:
    """A missing package on every node."""
    failure = Failure(failure_class=FailureClass.IMPORT, message="no module named torch")
    cluster = Cluster(planned(*[job(str(n)) for n in range(100)]), breaker_failures=4)
    cluster.join(node())
    cluster.stopped(*list(cluster.starting)[:4], failure=failure)
    assert {row.state for row in cluster.rows} == {State.NOT_STARTED}
    assert "no module named torch" in cluster.rows[0].reason
    cluster.play_out()


def test_workers_that_did_not_start_because_their_node_was_lost_do_not_trip_the_breaker() -> None:
    """Neither are its cards to blame: it joins again, and everything runs there."""
    failure = Failure(failure_class=FailureClass.NODE_LOST, message="its spawner ended")
    jobs = planned(*[job(str(n)) for n in range(20)])
    cluster = Cluster(jobs, breaker_failures=4, card_failures=1)
    cluster.join(node())
    cluster.stopped(*list(cluster.starting), failure=failure)
    assert cluster.finished is None
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_the_breaker_trips_when_every_gang_has_a_worker_that_does_not_start() -> None:
    """Those that are stopped with their gangs say nothing: the failed ones count in their order."""
    failure = Failure(failure_class=FailureClass.IMPORT, message="no module named torch")
    cluster = Cluster(planned(*[job(str(n), cards=2) for n in range(50)]), breaker_failures=4)
    cluster.join(*[node(f"n{n}", cards=2) for n in range(6)])
    last_ranks = [each for each, start in cluster.starting.items() if start.rank == 1]
    cluster.stopped(*last_ranks[:3], failure=failure)
    assert not any(row.state is State.NOT_STARTED for row in cluster.rows)
    cluster.stopped(last_ranks[3], failure=failure)
    assert len([row for row in cluster.rows if row.state is State.NOT_STARTED]) == 50
    cluster.play_out()


def test_workers_that_were_lost_while_starting_do_not_keep_the_breaker_waiting() -> None:
    """The first cards went with their node; of the others no worker starts."""
    failure = Failure(failure_class=FailureClass.IMPORT, message="no module named torch")
    cluster = Cluster(planned(*[job(str(n)) for n in range(100)]), breaker_failures=4)
    cluster.join(node("n1"), node("n2"))
    cluster.leave("n1")
    cluster.stopped(*list(cluster.starting)[:4], failure=failure)
    assert {row.state for row in cluster.rows} == {State.NOT_STARTED}
    cluster.play_out()


def test_attempts_that_were_lost_with_their_node_do_not_trip_the_breaker() -> None:
    """The first ones all run there, for however long; the other node does their jobs."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(20)]), breaker_failures=4)
    cluster.join(node("n1", cards=4), node("n2", cards=4))
    cluster.ready(*[each for each, start in cluster.starting.items() if start.card.node_id == "n1"])
    assert len(cluster.running) == 4
    cluster.leave("n1")
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_workers_that_die_late_do_not_trip_the_breaker() -> None:
    """How long their attempts had run is known though no worker is left to tell it; the rows have
    it, too."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(20)]), breaker_failures=4)
    cluster.join(node(cards=4))
    cluster.ready()
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
    """Then the surroundings are sound, and every failure is judged by itself."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(30)]), breaker_failures=3)
    cluster.join(node())
    cluster.ready()
    first, *others = list(cluster.running.values())
    cluster.ends(first.attempt, state, failure_class, took=took)
    for run in others:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)
    assert State.NOT_STARTED not in {row.state for row in cluster.rows}
    cluster.play_out()


def test_faults_of_the_jobs_do_not_trip_the_breaker() -> None:
    """A grid of nonsense fails job by job, each with its own reason."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(30)]), breaker_failures=3)
    cluster.join(node())
    for _ in range(30):
        cluster.ready()
        first = next(iter(cluster.running.values())).attempt
        cluster.ends(first, State.FAILED, FailureClass.BAD_CONFIGURATION, took=1)
    assert {row.state for row in cluster.rows} == {State.FAILED}


def test_a_few_that_fail_first_among_many_do_not_trip_the_breaker() -> None:
    """Three of eight crash at once while those begun before them are still well."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(30)]), breaker_failures=3)
    cluster.join(node())
    cluster.ready()
    for run in list(cluster.running.values())[-3:]:
        cluster.ends(run.attempt, State.FAILED, FailureClass.CRASH, took=1)
    assert State.NOT_STARTED not in {row.state for row in cluster.rows}
    cluster.play_out()


def test_one_job_that_keeps_failing_does_not_trip_the_breaker() -> None:
    """It takes as many jobs or cards, not as many tries."""
    cluster = Cluster(planned(job("poison")), breaker_failures=2)
    cluster.join(node())
    cluster.play_out(State.FAILED)
    assert cluster.finals()["poison"].state is State.FAILED


def test_after_a_stop_request_what_runs_is_finished_and_the_rest_not_started() -> None:
    """The running job keeps its result; gathering gangs and waiting jobs say why they did not."""
    cluster = Cluster(planned(job("a"), job("b"), job("c")))
    cluster.join(node(cards=1))
    cluster.ready()
    running = cluster.only().job.dataset
    cluster.stop_request("SIGTERM")
    states = {name: row.state for name, row in cluster.finals().items()}
    assert states == {n: State.NOT_STARTED for n in "abc" if n != running}
    cluster.ends(cluster.only())
    assert cluster.finals()[running].state is State.SUCCEEDED
    cluster.stopped()
    assert cluster.finished is not None and cluster.finished.reason == "SIGTERM"


def test_a_second_stop_request_stops_what_runs() -> None:
    """Its row says LOST, so that a resumed run measures it again."""
    cluster = Cluster(planned(job("a")))
    cluster.join(node())
    cluster.ready()
    assert not kinds(cluster.stop_request())
    assert kinds(cluster.stop_request()) == ["StopWorker"]
    cluster.ends(cluster.only(), State.LOST, FailureClass.NODE_LOST)
    assert cluster.finals()["a"].state is State.LOST
    cluster.stopped()
    assert cluster.finished is not None


def test_a_stop_request_may_stop_what_runs_at_once() -> None:
    """With ``finish_running`` off, a worker that is merely gone ends its attempt as well."""
    cluster = Cluster(planned(job("a")), finish_running=False)
    cluster.join(node())
    cluster.ready()
    assert kinds(cluster.stop_request()) == ["StopWorker"]
    cluster.stopped()
    assert cluster.finals()["a"].state is State.LOST
    assert cluster.finished is not None


def test_a_gathering_gang_is_let_go_by_a_stop_request() -> None:
    """Its workers are stopped and nothing new is started on their cards."""
    cluster = Cluster(planned(job("gang", cards=8)))
    cluster.join(node())
    cluster.stop_request()
    assert len(cluster.stopping) == 8
    cluster.stopped()
    assert not cluster.starting
    assert cluster.finished is not None


def test_the_run_is_finished_once_when_every_worker_is_stopped() -> None:
    """``RunFinished`` is the last command, and nothing follows it."""
    cluster = Cluster(planned(job("a"), job("b")))
    cluster.join(node())
    cluster.ready()
    for run in list(cluster.running.values()):
        cluster.ends(run.attempt)
    assert cluster.finished is None and len(cluster.stopping) == 2
    first, second = cluster.stopping
    assert kinds(cluster.stopped(first)) == []
    assert kinds(cluster.stopped(second)) == ["RunFinished"]
    assert cluster.tick(10) == [] and cluster.stop_request() == []


def test_counts_add_up_at_every_step() -> None:
    """Every job of the run is in exactly one state."""
    jobs = [*planned(*[job(str(n)) for n in range(10)])]
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


def test_a_card_is_named_by_its_worker() -> None:
    """Logs and the Ray dashboard show where a worker is."""
    cluster = Cluster(planned(job()))
    cluster.join(node("hpu-1"))
    [worker_id] = cluster.starting
    assert worker_id.startswith("hpu-1-HPU")
    assert cluster.starting[worker_id].card == Card(
        node_id="hpu-1", index=0, accelerator=Accelerator.HPU
    )
