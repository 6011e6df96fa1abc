"""The rules of the schedule, one by one, on a cluster in the test's hands."""

from __future__ import annotations

import pytest
from schedule_cases import Cluster, Fixed, cards_of, job, kinds, node, planned

from orchestrator.cluster import Card
from orchestrator.events import RecordRow, RunAttempt, StartWorker, StopWorker
from orchestrator.failure import Failure, FailureClass
from orchestrator.job import MAX, Accelerator, Job, State
from orchestrator.plan import Action, PlannedJob

ACQUIRE = Failure(failure_class=FailureClass.ACQUIRE, message="card is held by pid 7")


def sweep(*sizes: int, **changes: object) -> list[Job]:
    """Batch sizes of one configuration."""
    return [job("sweep", batch_size=size, **changes) for size in sizes]


def batch_finals(cluster: Cluster) -> dict[object, RecordRow]:
    return {row.job.batch_size: row for row in cluster.rows if row.final}


# ------------------------------------------------------------ what is planned


def test_unsupported_jobs_get_their_row_at_the_first_event() -> None:
    """Before any card is there: they need none."""
    plan = [PlannedJob(job=job("no"), action=Action.UNSUPPORTED, reason="int4 on hpu")]
    cluster = Cluster([*plan, *planned(job("yes"))])
    [row] = [c for c in cluster.tick() if isinstance(c, RecordRow)]
    assert (row.state, row.reason, row.final) == (State.UNSUPPORTED, "int4 on hpu", True)
    assert row.attempt is None


@pytest.mark.parametrize("action", [Action.REUSE, Action.SKIP])
def test_what_has_a_row_already_gets_no_other(action: Action) -> None:
    """A run with nothing to do ends at the first event."""
    cluster = Cluster([PlannedJob(job=job(), action=action)])
    assert kinds(cluster.tick()) == ["RunFinished"]
    assert cluster.rows == []


def test_a_job_that_is_planned_twice_runs_once() -> None:
    """Two experiments may name the same point; it has one identity and one row."""
    cluster = Cluster(planned(job("a"), job("a", experiment="other")))
    cluster.join(node())
    cluster.play_out()
    assert len(cluster.rows) == 1


def test_the_same_events_give_the_same_commands() -> None:
    """Nothing but the events decides."""
    logs = []
    for _ in range(2):
        cluster = Cluster(planned(*[job(str(n), cards=1 + n % 2) for n in range(30)]))
        cluster.join(node("n1"), node("n2"))
        cluster.play_out()
        logs.append(cluster.log)
    assert logs[0] == logs[1]


def test_attempt_ids_go_on_where_an_earlier_invocation_stopped() -> None:
    """They are unique in the run, not only in this process."""
    this = job()
    cluster = Cluster(planned(this), attempts_before={this.job_id: 3})
    cluster.join(node())
    cluster.ready()
    assert cluster.only().attempt_id == f"{this.job_id}-4"


# ------------------------------------------------------------ one-card jobs


def test_longest_first() -> None:
    """On one card the longest job goes first, whatever the order of the plan."""
    estimates = Fixed(by_name={"short": 5, "long": 50, "middle": 20})
    cluster = Cluster(planned(job("short"), job("long"), job("middle")), estimates=estimates)
    cluster.join(node(cards=1))
    cluster.ready()
    order = []
    while cluster.running:
        order.append(cluster.only().job.dataset)
        cluster.ends(cluster.only())
    assert order == ["long", "middle", "short"]


def test_a_worker_goes_on_with_the_model_it_holds() -> None:
    """Though a longer job of another model waits: its load would be paid for nothing."""
    estimates = Fixed(by_name={"a1": 30, "a2": 20, "b1": 25, "b2": 25, "b3": 25})
    jobs = [job("a1"), job("a2"), *[job(n, model="other") for n in ("b1", "b2", "b3")]]
    cluster = Cluster(planned(*jobs), estimates=estimates)
    cluster.join(node(cards=2))
    cluster.ready()
    held = cluster.run_of("a1")
    commands = cluster.ends(held)
    [run] = [c for c in commands if isinstance(c, RunAttempt)]
    assert run.attempt.job.dataset == "a2"
    assert run.attempt.cards == held.cards


def test_a_model_nobody_holds_is_begun_before_it_is_too_late() -> None:
    """A job longer than all that is left goes before more of the model that a worker holds."""
    names = [f"a{n}" for n in range(6)]
    jobs = [*[job(name) for name in names], job("long", model="b")]
    lasts = dict.fromkeys(names, 30.0) | {"long": 500.0}
    cluster = Cluster(planned(*jobs), estimates=Fixed(by_name=lasts))
    cluster.join(node("n1", cards=2), node("n2", cards=2))
    cluster.ready()
    cluster.leave(cluster.run_of("long").cards[0].node_id)
    assert len(cluster.running) == 2  # of the other model, of which more is waiting
    cluster.ends(next(iter(cluster.running.values())).attempt, took=30)
    assert cluster.run_of("long")


def test_an_idle_worker_with_the_model_is_used_before_a_new_one_is_started() -> None:
    """A retry of a job goes back to the warm worker, though other cards stand empty."""
    cluster = Cluster(planned(job("a"), job("b")), estimates=Fixed(run_s=100))
    cluster.join(node("n1", cards=2), node("n2", cards=2))
    cluster.ready()
    survivor = cluster.run_of("a").cards[0].node_id
    other = "n2" if survivor == "n1" else "n1"
    cluster.ends(cluster.run_of("a"))
    commands = cluster.leave(other)
    assert [type(c) for c in commands if not isinstance(c, RecordRow)] == [RunAttempt]
    assert cluster.only().job.dataset == "b"
    assert cluster.only().cards[0].node_id == survivor


def test_of_two_idle_workers_the_one_with_the_model_is_used() -> None:
    """A job that comes back goes where its model is, not to whoever has waited longest."""
    jobs = [job("x", model="x"), job("y1", model="y"), job("y2", model="y")]
    cluster = Cluster(planned(*jobs))
    cluster.join(node("n1", cards=1), node("n2", cards=1), node("n3", cards=1))
    cluster.ready()
    held = cluster.run_of("y1").cards
    lost = cluster.run_of("y2").cards[0].node_id
    cluster.ends(cluster.run_of("x"))
    cluster.ends(cluster.run_of("y1"))
    cluster.leave(lost)
    assert cluster.run_of("y2").cards == held


def test_an_idle_worker_takes_another_model_before_a_new_worker_is_started() -> None:
    """Loading costs less than starting and loading."""
    jobs = [job("x", model="x"), job("y", model="y")]
    cluster = Cluster(planned(*jobs))
    cluster.join(node("n1", cards=2), node("n2", cards=1))
    cluster.ready()
    gone = cluster.run_of("x").cards[0].node_id
    stays = "y" if gone == "n2" else "x"
    goes = "x" if stays == "y" else "y"
    cluster.ends(cluster.run_of(stays))
    commands = cluster.leave("n2")
    assert not cards_of(commands)
    assert cluster.run_of(goes).cards[0].node_id == "n1"


def test_a_model_is_not_given_a_worker_that_a_busy_one_makes_needless() -> None:
    """Another model's job of two seconds waits for the worker that is free in two, though a
    card stands empty: a new worker takes eight to start."""
    jobs = [job("a"), job("b", model="b")]
    cluster = Cluster(planned(*jobs), estimates=Fixed(run_s=2, load_s=0.1), max_starting=1)
    cluster.join(node(cards=2))
    cluster.ready()
    assert not cluster.starting
    cluster.ends(cluster.only(), took=2)
    assert cluster.running and not cluster.starting


def test_a_job_does_not_wait_for_a_worker_that_overruns() -> None:
    """Left to a busy worker because that is sooner; when it is not, another is started."""
    estimates = Fixed(load_s=0.1, by_name={"a": 4.0, "b": 2.0})
    cluster = Cluster(planned(job("a"), job("b")), estimates=estimates, max_starting=1)
    cluster.join(node(cards=2))
    cluster.ready()
    assert cluster.only().job.dataset == "a"
    assert not cluster.starting
    waited = 0
    while not cluster.starting:
        waited += 1
        assert waited < 20
        cluster.tick(min(at for at in cluster.wakes if at > cluster.now) - cluster.now)
    assert cluster.only().job.dataset == "a"


def test_no_worker_is_started_for_work_that_is_done_sooner_without() -> None:
    """Four jobs of half a second: a second worker would come up to an empty queue."""
    cluster = Cluster(
        planned(*[job(str(n)) for n in range(4)]),
        estimates=Fixed(run_s=0.5, load_s=0.1),
        worker_start_s=8.0,
        max_starting=1,
    )
    cluster.join(node())
    cluster.ready()
    cluster.play_out()
    assert len([c for c in cluster.log if isinstance(c, StartWorker)]) == 1


def test_no_more_workers_than_jobs_are_started() -> None:
    """Three jobs on eight cards: three workers."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(3)]))
    assert len(cards_of(cluster.join(node()))) == 3


def test_new_workers_are_spread_over_the_nodes() -> None:
    """Neighbours share a host's cores and memory bandwidth."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(4)]))
    cards = cards_of(cluster.join(node("n1"), node("n2"), node("n3"), node("n4")))
    assert sorted(card.node_id for card in cards) == ["n1", "n2", "n3", "n4"]


def test_only_so_many_workers_start_at_once() -> None:
    """Eight processes importing together on two cores take a minute."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(8)]), max_starting=2)
    cluster.join(node())
    assert len(cluster.starting) == 2
    cluster.ready(next(iter(cluster.starting)))
    assert len(cluster.starting) == 2


def test_isolated_jobs_get_a_process_of_their_own() -> None:
    """``isolation: process``: a fresh worker each, and its card leased again when it is gone."""
    cluster = Cluster(planned(*[job(n, isolation="process") for n in "abc"]))
    cluster.join(node(cards=1))
    workers = []
    while cluster.finished is None:
        workers += list(cluster.starting)
        cluster.ready()
        commands = cluster.ends(cluster.only())
        assert kinds(commands) == ["RecordRow", "StopWorker"]
        cluster.stopped()
    assert len(set(workers)) == 3


def test_a_worker_is_kept_for_the_next_job() -> None:
    """One start for many jobs."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(20)]))
    cluster.join(node(cards=1))
    cluster.play_out()
    assert len([c for c in cluster.log if isinstance(c, StartWorker)]) == 1


def test_the_row_comes_before_the_card_is_given_away() -> None:
    """What was measured is safe before anything else happens on its card."""
    cluster = Cluster(planned(job("a"), job("b")))
    cluster.join(node(cards=1))
    cluster.ready()
    assert kinds(cluster.ends(cluster.only())) == ["RecordRow", "RunAttempt"]


def test_jobs_go_to_cards_of_their_kind() -> None:
    """HPU, GPU and CPU jobs run in one run, each on its own."""
    kinds_of = {kind: job(kind.value, accelerator=kind) for kind in Accelerator}
    cluster = Cluster(planned(*kinds_of.values()))
    cluster.join(*[node(kind.value, accelerator=kind) for kind in Accelerator])
    cluster.ready()
    placed = {run.attempt.job.dataset: run.attempt.cards[0] for run in cluster.running.values()}
    assert {name: card.accelerator.value for name, card in placed.items()} == {
        kind.value: kind.value for kind in Accelerator
    }


# ------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("state", "failure_class"),
    [
        (State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY),
        (State.FAILED, FailureClass.CRASH),
        (State.TIMED_OUT, FailureClass.HANG),
    ],
)
def test_a_worker_is_replaced_after(state: State, failure_class: FailureClass) -> None:
    """Its card is used again only when the process is gone."""
    cluster = Cluster(planned(job("a"), job("b")))
    cluster.join(node(cards=1))
    cluster.ready()
    [worker] = cluster.up
    commands = cluster.ends(cluster.only(), state, failure_class)
    assert [c.worker_id for c in commands if isinstance(c, StopWorker)] == [worker]
    assert not cards_of(commands)
    assert len(cards_of(cluster.stopped(worker))) == 1


def test_a_harmless_failure_leaves_the_worker() -> None:
    """A job that contradicts itself does no harm to the process."""
    cluster = Cluster(planned(job("a"), job("b")))
    cluster.join(node(cards=1))
    cluster.ready()
    commands = cluster.ends(cluster.only(), State.FAILED, FailureClass.BAD_CONFIGURATION)
    assert kinds(commands) == ["RecordRow", "RunAttempt"]


def test_every_attempt_has_a_row_and_only_the_last_is_final() -> None:
    """A job that crashes until its retries are used up."""
    cluster = Cluster(planned(job()), breaker_failures=99)
    cluster.join(node())
    while cluster.finished is None:
        cluster.ready()
        if cluster.running:
            cluster.ends(cluster.only(), State.FAILED, FailureClass.CRASH)
        if cluster.stopping:
            cluster.stopped()
        cluster.tick(10)
    assert [(row.final, row.attempt and row.attempt.number) for row in cluster.rows] == [
        (False, 1),
        (False, 2),
        (True, 3),
    ]
    assert cluster.rows[-1].state is State.FAILED


def test_a_retry_waits_and_goes_to_another_card() -> None:
    """After a crash: a pause, then a card that it has not crashed on."""
    cluster = Cluster(planned(job()))
    cluster.join(node(cards=2))
    cluster.ready()
    first = cluster.only()
    cluster.ends(first, State.FAILED, FailureClass.CRASH)
    cluster.stopped()
    assert not cluster.starting
    cluster.tick(2.0)
    cluster.ready()
    assert cluster.only().cards != first.cards
    assert cluster.only().attempt_id != first.attempt_id


def test_a_retry_stays_where_it_is_when_there_is_nowhere_else() -> None:
    """Elsewhere is a wish, not a condition: the job does not wait for ever."""
    cluster = Cluster(planned(job()))
    cluster.join(node(cards=1))
    cluster.ready()
    cluster.ends(cluster.only(), State.FAILED, FailureClass.ERROR)
    cluster.play_out()
    assert cluster.finals()["a"].state is State.SUCCEEDED


def test_a_retry_comes_back_when_elsewhere_has_gone() -> None:
    """It waits for the other card, whose node is then lost."""
    cluster = Cluster(planned(job("a"), job("b")))
    cluster.join(node("n1", cards=1), node("n2", cards=1))
    cluster.ready()
    first = cluster.run_of("a")
    other = cluster.run_of("b").cards[0].node_id
    cluster.ends(first, State.FAILED, FailureClass.ERROR, took=1)
    cluster.stopped()
    assert not cluster.starting  # it will not have the card it failed on
    cluster.leave(other)
    cluster.ready()
    assert cluster.running
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_out_of_memory_prunes_larger_batches_that_do_not_run() -> None:
    """8 does not fit: 32 and 64 would fail too. 16 runs already and keeps its own result, 4 is
    smaller, and another dataset is another configuration."""
    lasts = {16: 400.0, 8: 300.0, 32: 200.0, 64: 100.0, 4: 50.0}
    jobs = [*sweep(4, 8, 16, 32, 64), job("else", batch_size=64)]
    cluster = Cluster(planned(*jobs), estimates=Fixed(by_name={"else": 10.0}, by_batch=lasts))
    cluster.join(node(cards=2))
    cluster.ready()
    by_size = {run.attempt.job.batch_size: run.attempt for run in cluster.running.values()}
    assert set(by_size) == {8, 16}
    commands = cluster.ends(by_size[8], State.OUT_OF_MEMORY)
    rows = {row.job.batch_size: row for row in commands if isinstance(row, RecordRow)}
    assert {size: row.state for size, row in rows.items()} == {
        8: State.OUT_OF_MEMORY,
        32: State.PRUNED,
        64: State.PRUNED,
    }
    assert "batch size 8" in rows[32].reason and by_size[8].attempt_id in rows[32].reason
    cluster.ends(by_size[16])
    cluster.play_out()
    assert batch_finals(cluster)[16].state is State.SUCCEEDED
    assert batch_finals(cluster)[4].state is State.SUCCEEDED
    assert cluster.finals()["else"].state is State.SUCCEEDED


def test_out_of_memory_prunes_only_the_same_configuration() -> None:
    """Another precision may well fit."""
    cluster = Cluster(planned(*sweep(1), *sweep(2, precision="int8")))
    cluster.join(node(cards=1))
    cluster.ready()
    if cluster.only().job.precision == "int8":
        cluster.ends(cluster.only())
    cluster.ends(cluster.only(), State.OUT_OF_MEMORY)
    cluster.play_out()
    assert State.PRUNED not in {row.state for row in cluster.rows}


def test_an_unacquirable_card_is_quarantined_at_once() -> None:
    """No job can have done that; the retry goes elsewhere and nothing comes back here."""
    cluster = Cluster(planned(*[job(str(n)) for n in range(5)]), card_paroles=0)
    cluster.join(node(cards=2))
    cluster.ready()
    bad = next(iter(cluster.running.values())).attempt
    cluster.ends(bad, State.FAILED, FailureClass.ACQUIRE)
    log = len(cluster.log)
    cluster.play_out()
    assert bad.cards[0] not in cards_of(cluster.log[log:])
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_only_the_rank_that_failed_quarantines_its_card() -> None:
    """A gang of four of which rank 2 could not get its card: the other three are used."""
    cluster = Cluster(
        planned(job("gang", cards=4), *[job(str(n)) for n in range(8)]),
        card_paroles=0,
        wait_for_nodes_s=1e6,
    )
    cluster.join(node(cards=4))
    cluster.ready()
    cluster.ends(cluster.only(), State.FAILED, FailureClass.ACQUIRE, ranks=(2,))
    cluster.stopped()
    cluster.ready()
    assert {run.attempt.cards[0].index for run in cluster.running.values()} == {0, 1, 3}


def test_a_poison_job_does_not_cost_healthy_cards() -> None:
    """Ten jobs that crash everywhere, on two cards: the cards stay in use for the good one."""
    poison = [job(f"poison{n}") for n in range(10)]
    cluster = Cluster(planned(*poison, job("good")), breaker_failures=999)
    cluster.join(node(cards=2))
    for _ in range(1000):
        if cluster.finished is not None:
            break
        for attempt in [run.attempt for run in cluster.running.values()]:
            if attempt.job.dataset == "good":
                cluster.ends(attempt)
            else:
                cluster.ends(attempt, State.FAILED, FailureClass.CRASH)
        cluster.stopped()
        cluster.ready()
        cluster.tick(5)
    assert cluster.finals()["good"].state is State.SUCCEEDED
    assert all(cluster.finals()[each.dataset].state is State.FAILED for each in poison)


def test_a_card_on_which_jobs_fail_that_work_elsewhere_is_quarantined() -> None:
    """Twice is enough: it was the card, not the jobs."""
    names = [str(n) for n in range(12)]
    cluster = Cluster(
        planned(*[job(n) for n in names]), card_strikes=2, card_paroles=0, breaker_failures=99
    )
    cluster.join(node(cards=2))
    failed = 0
    for _ in range(400):
        if cluster.finished is not None:
            break
        for attempt in [run.attempt for run in cluster.running.values()]:
            bad = attempt.cards[0].index == 1
            failed += bad
            if bad:
                cluster.ends(attempt, State.TIMED_OUT, FailureClass.HANG)
            else:
                cluster.ends(attempt)
        cluster.stopped()
        cluster.ready()
        cluster.tick(5)
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}
    assert 2 <= failed < 6


def test_a_card_that_is_quarantined_while_it_runs_loses_its_worker_afterwards() -> None:
    """What runs there is finished and counted; then the card is left alone."""
    jobs = [job("p"), job("q"), job("r")]
    lasts = {"p": 300.0, "q": 200.0, "r": 100.0}
    cluster = Cluster(planned(*jobs), estimates=Fixed(by_name=lasts), card_strikes=1)
    cluster.join(node(cards=2))
    cluster.ready()
    bad = cluster.run_of("p").cards[0]
    cluster.ends(cluster.run_of("p"), State.FAILED, FailureClass.CRASH, took=1)
    cluster.stopped()
    cluster.ready()
    assert cluster.run_of("r").cards[0] == bad
    cluster.tick(2)
    cluster.ends(cluster.run_of("q"))
    cluster.stopped()
    cluster.ready()
    cluster.ends(cluster.run_of("p"))  # it works on the other card: the bad one is to blame
    on_bad = next(name for name, start in cluster.up.items() if start.card == bad)
    commands = cluster.ends(cluster.run_of("r"))
    stops = {c.worker_id: c.reason for c in commands if isinstance(c, StopWorker)}
    assert "is quarantined" in stops[on_bad]
    assert cluster.finals()["r"].state is State.SUCCEEDED


# ------------------------------------------------------------ workers that do not start


def test_a_card_rests_after_a_failed_start_and_is_quarantined_after_some() -> None:
    """The job is not to blame and runs as soon as another card is there."""
    cluster = Cluster(planned(job()), card_rest_s=5.0, card_strikes=2, wait_for_nodes_s=100)
    cluster.join(node(cards=1))
    commands = cluster.stopped(*cluster.starting, failure=ACQUIRE)
    assert not cards_of(commands)
    assert len(cards_of(cluster.tick(5.0))) == 1
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    assert not cards_of(cluster.tick(50.0))
    cluster.join(node("n2", cards=1))
    cluster.play_out()
    assert cluster.finals()["a"].state is State.SUCCEEDED


def test_a_quarantined_card_is_tried_again_after_a_time_that_doubles() -> None:
    """Whatever held it may have let go; at its first new failure it is out for longer."""
    cluster = Cluster(
        planned(job()), card_strikes=2, card_paroles=2, quarantine_s=100, card_rest_s=1
    )
    cluster.join(node(cards=1))
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    cluster.tick(1)
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    assert not cards_of(cluster.tick(99))
    assert len(cards_of(cluster.tick(1))) == 1
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    assert not cards_of(cluster.tick(199))
    assert len(cards_of(cluster.tick(1))) == 1
    cluster.play_out()
    assert cluster.finals()["a"].state is State.SUCCEEDED


def test_a_card_that_fails_after_every_quarantine_is_used_no_more() -> None:
    """There is an end to it, and the job that waited says so."""
    cluster = Cluster(planned(job()), card_strikes=1, card_paroles=2, wait_for_nodes_s=30)
    cluster.join(node(cards=1))
    starts = 0
    for _ in range(500):
        if cluster.finished is not None:
            break
        starts += len(cluster.starting)
        cluster.stopped(*cluster.starting, failure=ACQUIRE)
        cluster.tick(10)
    assert starts == 3
    assert cluster.finals()["a"].state is State.LOST


def test_a_job_for_which_no_card_is_left_says_so() -> None:
    """All quarantined, and no node joined for a while: LOST, with the reason."""
    cluster = Cluster(planned(job()), card_strikes=1, card_paroles=0, wait_for_nodes_s=30)
    cluster.join(node(cards=1))
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    assert cluster.finished is None
    cluster.tick(30.0)
    row = cluster.finals()["a"]
    assert row.state is State.LOST
    assert "no 1 HPU cards" in row.reason and "0 usable cards" in row.reason
    assert cluster.finished is not None


def test_a_job_that_no_node_could_ever_hold_ends() -> None:
    """Eight cards wanted, four there: it ends while the others run."""
    cluster = Cluster(planned(job("wide", cards=8), job("narrow")), wait_for_nodes_s=30)
    cluster.join(node(cards=4))
    cluster.play_out()
    finals = cluster.finals()
    assert (finals["wide"].state, finals["narrow"].state) == (State.LOST, State.SUCCEEDED)


def test_a_node_that_comes_late_is_used() -> None:
    """Nothing is given up while one may still join."""
    cluster = Cluster(planned(job()), wait_for_nodes_s=60)
    cluster.tick()
    cluster.tick(59.0)
    cluster.join(node())
    cluster.tick(60.0)
    cluster.play_out()
    assert cluster.finals()["a"].state is State.SUCCEEDED


def test_a_gang_of_which_one_worker_does_not_start_is_stopped_and_retried() -> None:
    """The others are stopped, the try has a row, and the next is on other cards."""
    cluster = Cluster(planned(job("gang", cards=4)))
    cluster.join(node(cards=8))
    dead, *others = cluster.starting
    cards = {start.card for start in cluster.starting.values()}
    cluster.ready(others[0])
    commands = cluster.stopped(dead, failure=ACQUIRE)
    assert {c.worker_id for c in commands if isinstance(c, StopWorker)} == set(others)
    [row] = cluster.rows
    assert not row.final and "did not start" in row.reason
    cluster.stopped()
    cluster.tick(10)
    assert not cards & {start.card for start in cluster.starting.values()}
    cluster.play_out()
    assert cluster.finals()["gang"].state is State.SUCCEEDED


def test_a_job_whose_workers_never_start_is_given_up() -> None:
    """Cards may be the reason once or twice, not for ever."""
    cluster = Cluster(
        planned(job("gang", cards=2)), max_start_failures=3, card_strikes=99, breaker_failures=99
    )
    cluster.join(node())
    for _ in range(50):
        if cluster.finished is not None:
            break
        if cluster.starting:
            cluster.stopped(next(iter(cluster.starting)), failure=ACQUIRE)
        cluster.stopped()
        cluster.tick(10)
    row = cluster.finals()["gang"]
    assert row.state is State.FAILED
    assert "4 workers for it did not start" in row.reason  # one more than 3 for its second card


# ------------------------------------------------------------ gangs


def test_a_gang_runs_when_all_its_workers_are_ready() -> None:
    """Fresh workers that know rank, local rank and world size from the start."""
    cluster = Cluster(planned(job("gang", cards=4)))
    starts = [c for c in cluster.join(node()) if isinstance(c, StartWorker)]
    assert [(s.rank, s.local_rank, s.world_size) for s in starts] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 2, 4),
        (3, 3, 4),
    ]
    assert [s.card.index for s in starts] == [0, 1, 2, 3]
    for start in starts[:3]:
        assert not kinds(cluster.ready(start.worker_id))
    [run] = cluster.ready(starts[3].worker_id)
    assert isinstance(run, RunAttempt)
    assert run.worker_ids == tuple(s.worker_id for s in starts)


def test_the_processes_of_a_gang_are_not_used_again() -> None:
    """All are stopped; the next gang on the same cards starts its own when they are gone."""
    cluster = Cluster(planned(job("a", cards=2), job("b", cards=2)))
    cluster.join(node(cards=2))
    cluster.ready()
    commands = cluster.ends(cluster.only())
    assert kinds(commands) == ["RecordRow", "StopWorker", "StopWorker"]
    first, second = cluster.stopping
    assert len(cards_of(cluster.stopped(first))) == 1
    assert len(cards_of(cluster.stopped(second))) == 1


def test_a_job_wider_than_a_node_takes_several_whole_ones() -> None:
    """Sixteen cards are two servers, with local ranks from 0 on each."""
    cluster = Cluster(planned(job("gang", cards=16)))
    cluster.join(node("n1"), node("n2"))
    starts = list(cluster.starting.values())
    assert [s.local_rank for s in starts] == [*range(8), *range(8)]
    assert [s.rank for s in starts] == list(range(16))
    cluster.play_out()
    assert cluster.finals()["gang"].state is State.SUCCEEDED


def test_a_gang_is_not_started_on_an_illegal_set() -> None:
    """Cards 3 and 4 are free, but not a pair of a Gaudi server."""
    cluster = Cluster(planned(job("gang", cards=2)), wait_for_nodes_s=10)
    cluster.join(node(card_indices=(3, 4), server_cards=8))
    assert not cluster.starting
    cluster.tick(10)
    assert cluster.finals()["gang"].state is State.LOST


def late_gang(*, cards: int = 8, singles: int = 60, run_s: float = 50.0) -> Cluster:
    """A cluster busy with one-card jobs into which a gang comes back from a lost node."""
    jobs = [job("gang", cards=cards), *[job(f"s{n:02}") for n in range(singles)]]
    estimates = Fixed(run_s=run_s, load_s=0, by_name={"gang": 10})
    cluster = Cluster(planned(*jobs), estimates=estimates, worker_start_s=1.0)
    cluster.join(node("n1", cards=cards), node("n2", cards=cards))
    cluster.ready()
    home = cluster.run_of("gang").cards[0].node_id
    cluster.leave(home)
    return cluster


def test_a_gang_never_starves_behind_one_card_jobs() -> None:
    """Its set is drained: sixty jobs wait, and not one more is started before it."""
    cluster = late_gang(singles=60)
    ended = 0
    while not any(s.world_size == 8 for s in cluster.starting.values()):
        assert cluster.running, "the gang waits though nothing runs"
        cluster.ends(next(iter(cluster.running.values())).attempt, took=6.0)
        cluster.stopped()
        ended += 1
    assert ended == 8  # those that ran when it came, and not one more
    cluster.play_out()


def test_backfill_takes_only_what_ends_in_time() -> None:
    """While a set drains, a short job may still use its cards, a long one not."""
    jobs = [job("gang", cards=2), job("long"), job("soon"), job("tiny"), job("big")]
    lasts = {"gang": 100, "long": 90, "soon": 20, "tiny": 15, "big": 80}
    cluster = Cluster(
        planned(*jobs), estimates=Fixed(load_s=0, by_name=lasts), worker_start_s=1.0, urgency=0.0
    )
    cluster.join(node("n1", cards=2), node("n2", cards=2))
    cluster.ready()
    home = cluster.run_of("gang").cards[0].node_id
    assert {run.attempt.job.dataset for run in cluster.running.values()} == {"gang", "long", "big"}
    cluster.leave(home)
    cluster.ends(cluster.run_of("big"), took=20)  # ahead of time: 70 s until "long" ends
    assert cluster.run_of("soon").cards[0].node_id != home
    cluster.ends(cluster.run_of("soon"), took=20)
    assert cluster.run_of("tiny")
    cluster.ends(cluster.run_of("tiny"), took=15)
    cluster.play_out()


def test_backfill_refuses_what_would_delay_the_gang() -> None:
    """The card of a drained set stands idle rather than make the gang wait."""
    jobs = [job("gang", cards=2), job("a"), job("b"), job("late")]
    lasts = {"gang": 200, "a": 90, "b": 80, "late": 75}
    cluster = Cluster(
        planned(*jobs), estimates=Fixed(load_s=0, by_name=lasts), worker_start_s=1.0, urgency=0.0
    )
    cluster.join(node("n1", cards=2), node("n2", cards=2))
    cluster.ready()
    cluster.leave(cluster.run_of("gang").cards[0].node_id)
    cluster.ends(cluster.run_of("b"), took=80)  # "a" has 10 s left, "late" takes 75
    assert {run.attempt.job.dataset for run in cluster.running.values()} == {"a"}
    cluster.ends(cluster.run_of("a"), took=10)
    cluster.stopped()
    assert {s.world_size for s in cluster.starting.values()} == {2}
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_gangs_go_first_and_narrow_jobs_fill_up() -> None:
    """Widest first: eight, then four, then the single ones in what is left."""
    jobs = [job("one"), job("four", cards=4), job("eight", cards=8), job("two", cards=2)]
    cluster = Cluster(planned(*jobs))
    cluster.join(node("n1"), node("n2"))
    cluster.ready()
    homes = {
        run.attempt.job.dataset: {card.node_id for card in run.attempt.cards}
        for run in cluster.running.values()
    }
    assert set(homes) == {"one", "two", "four", "eight"}
    assert homes["one"] == homes["two"] == homes["four"] != homes["eight"]


def test_one_card_jobs_are_packed_while_gangs_wait() -> None:
    """They share a pair or quad that is broken already, so that the other quad stays whole."""
    jobs = [job("gang", cards=16), *[job(f"s{n}") for n in range(2)]]
    lasts = {"gang": 10.0, "s0": 500.0, "s1": 500.0}
    cluster = Cluster(planned(*jobs), estimates=Fixed(by_name=lasts), worker_start_s=1.0)
    cluster.join(node("n1"))
    cards = [start.card for start in cluster.starting.values()]
    assert len(cards) == 2
    assert {card.index // 2 for card in cards} == {0}


def test_a_job_as_long_as_all_the_rest_goes_before_wider_ones() -> None:
    """Started last, it would hold up the end alone."""
    jobs = [job("marathon"), *[job(f"g{n}", cards=8) for n in range(6)]]
    lasts = {"marathon": 1000.0}
    cluster = Cluster(planned(*jobs), estimates=Fixed(run_s=100, by_name=lasts))
    cluster.join(node("n1"), node("n2"))
    cluster.ready()
    assert cluster.run_of("marathon")
    assert len(cluster.running) == 2


# ------------------------------------------------------------ nodes


def test_attempts_on_a_lost_node_are_lost_and_retried_elsewhere() -> None:
    """Their rows say LOST and are not final."""
    cluster = Cluster(planned(job("a")))
    cluster.join(node("n1", cards=1), node("n2", cards=1))
    cluster.ready()
    lost = cluster.only()
    cluster.leave(lost.cards[0].node_id)
    [row] = cluster.rows
    assert (row.state, row.final) == (State.LOST, False)
    cluster.play_out()
    assert cluster.finals()["a"].attempt.number == 2  # type: ignore[union-attr]


def test_a_late_result_is_kept_but_not_counted() -> None:
    """A frozen node comes back with a result after its job has run elsewhere."""
    cluster = Cluster(planned(job("a"), job("b")))
    cluster.join(node("n1", cards=1), node("n2", cards=1))
    cluster.ready()
    lost = cluster.run_of("a")
    cluster.leave(lost.cards[0].node_id)
    cluster.ends(cluster.run_of("b"))
    again = cluster.run_of("a")
    cluster.ends(again)
    assert cluster.finished is None
    rows = len(cluster.rows)
    cluster.ends(lost)
    late = cluster.rows[rows:]
    assert [(row.final, row.state) for row in late] == [(False, State.SUCCEEDED)]
    assert cluster.finals()["a"].attempt == again
    assert cluster.schedule.counts()[State.SUCCEEDED] == 2


def test_the_result_of_a_given_up_attempt_does_not_end_its_successor() -> None:
    """While the second try runs, the first one's result arrives: the second goes on."""
    cluster = Cluster(planned(job("a")))
    cluster.join(node("n1", cards=1), node("n2", cards=1))
    cluster.ready()
    lost = cluster.only()
    cluster.leave(lost.cards[0].node_id)
    cluster.ready()
    second = cluster.only()
    cluster.ends(lost)
    assert "a" not in cluster.finals()
    cluster.ends(second)
    assert cluster.finals()["a"].attempt == second


def test_a_duplicate_outcome_is_not_counted_twice() -> None:
    """The second report of the same attempt is a row that is not final."""
    cluster = Cluster(planned(job("a"), job("b")))
    cluster.join(node(cards=1))
    cluster.ready()
    first = cluster.only()
    cluster.ends(first)
    cluster.ends(first)
    assert [row.final for row in cluster.rows] == [True, False]
    cluster.play_out()


def test_a_gang_that_loses_one_node_leaves_the_other_free() -> None:
    """Its surviving workers are stopped before the card is used again."""
    cluster = Cluster(planned(job("gang", cards=4), job("s")), wait_for_nodes_s=10)
    cluster.join(node("n1", cards=2), node("n2", cards=2))
    cluster.ready()
    assert cluster.only().job.dataset == "gang"
    commands = cluster.leave("n2")
    assert len([c for c in commands if isinstance(c, StopWorker)]) == 2
    cluster.play_out()
    finals = cluster.finals()
    assert (finals["gang"].state, finals["s"].state) == (State.LOST, State.SUCCEEDED)


def test_a_worker_that_stops_in_an_attempt_without_a_word_ends_it() -> None:
    """An executor that only sees the process go is enough."""
    cluster = Cluster(planned(job("a")))
    cluster.join(node())
    cluster.ready()
    [worker] = cluster.up
    cluster.running.clear()
    cluster.stopped(worker)
    [row] = cluster.rows
    assert (row.state, row.final) == (State.LOST, False)
    assert "crash" in row.reason
    cluster.play_out()


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
    cluster = Cluster(planned(job(batch_size=MAX)), max_batch_size=4)
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
    cluster = Cluster(planned(job(batch_size=MAX)), max_batch_size=8)
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


def test_the_breaker_trips_when_no_worker_starts() -> None:
    """A missing package on every node."""
    failure = Failure(failure_class=FailureClass.IMPORT, message="no module named torch")
    cluster = Cluster(planned(*[job(str(n)) for n in range(100)]), breaker_failures=4)
    cluster.join(node())
    cluster.stopped(*list(cluster.starting)[:4], failure=failure)
    assert {row.state for row in cluster.rows} == {State.NOT_STARTED}
    assert "no module named torch" in cluster.rows[0].reason
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
