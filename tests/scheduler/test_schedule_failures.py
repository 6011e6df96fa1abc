"""The fate of failed attempts, their workers and their cards."""

from __future__ import annotations

import pytest
from schedule_cases import Cluster, Fixed, cards_of, job, kinds, node, planned

from orchestrator.core.events import RecordRow, StopWorker
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import Failure, FailureClass


def sweep(*sizes: int, **changes: object) -> list[Job]:
    """Batch sizes of one configuration."""
    return [job("sweep", batch_size=size, **changes) for size in sizes]


def batch_finals(cluster: Cluster) -> dict[object, RecordRow]:
    return {row.job.batch_size: row for row in cluster.rows if row.final}


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


def test_a_retry_goes_elsewhere_when_another_card_comes() -> None:
    """There was none when it was due: it waits for the new card, not for the one it failed on."""
    cluster = Cluster(
        planned(job("a"), job("b")), estimates=Fixed(by_name={"a": 300.0, "b": 100.0})
    )
    cluster.join(node("n1", cards=1))
    cluster.ready()
    cluster.ends(cluster.run_of("a"), State.FAILED, FailureClass.ERROR)
    cluster.stopped()
    [on_n1] = cluster.starting
    cluster.join(node("n2", cards=1))
    cluster.ready(on_n1)
    assert cluster.only().job.dataset == "b"
    cluster.ready()
    assert cluster.run_of("a").cards[0].node_id == "n2"


def test_a_retry_goes_elsewhere_when_a_quarantine_ends() -> None:
    """The card on which the job has failed is the only usable one, and busy, when the other is
    tried again."""
    failure = Failure(failure_class=FailureClass.ACQUIRE, message="held by another process")
    lasts = {"a": 300.0, "b": 200.0, "c": 100.0}
    cluster = Cluster(planned(*[job(name) for name in lasts]), estimates=Fixed(by_name=lasts))
    cluster.join(node(cards=2))
    bad, good = cluster.starting
    for _ in range(2):  # to quarantine
        cluster.stopped(bad, failure=failure)
        cluster.tick(5.0)
        bad = next((each for each in cluster.starting if each != good), "")
    cluster.ready(good)
    first = cluster.only()
    cluster.ends(first, State.FAILED, FailureClass.ERROR, took=10)
    cluster.stopped(good)
    [good] = cluster.starting
    cluster.tick(300.0)
    cluster.ready(good)
    assert cluster.only().job.dataset == "b"
    cluster.ready()
    assert cluster.run_of("a").cards != first.cards


@pytest.mark.parametrize("cards", [2, 3])
def test_each_retry_is_on_another_card_than_the_last(cards: int) -> None:
    """Of cards on which the job has failed, the longest ago is the best, as long as there is no
    other."""
    cluster = Cluster(planned(job()), card_failures=99, breaker_failures=99)
    cluster.join(node(cards=cards))
    tried = []
    while cluster.finished is None:
        cluster.ready()
        if cluster.running:
            tried.append(cluster.only().cards)
            failure_class = FailureClass.CRASH if len(tried) % 2 else FailureClass.COLLECTIVE
            cluster.ends(cluster.only(), State.FAILED, failure_class)
        cluster.stopped()
        cluster.tick(60)
    assert len(tried) == 5
    for number, at in enumerate(tried):
        assert at not in tried[max(0, number - cards + 1) : number]


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
    cluster = Cluster(planned(*[job(str(n)) for n in range(5)]), card_readmissions=0)
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
        card_readmissions=0,
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
        planned(*[job(n) for n in names]), card_failures=2, card_readmissions=0, breaker_failures=99
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
    cluster = Cluster(planned(*jobs), estimates=Fixed(by_name=lasts), card_failures=1)
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
