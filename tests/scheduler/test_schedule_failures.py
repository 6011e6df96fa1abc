"""The fate of failed attempts, their workers and their cards."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from schedule_cases import (
    Fixed,
    busy_cluster,
    cards_of,
    cluster_of,
    job,
    kinds,
    nodes,
    numbered,
)

from orchestrator.core.events import RecordRow, StopWorker
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import FailureClass
from orchestrator.scheduler.retry import POLICIES


def sweep(*sizes: int, **changes: object) -> list[Job]:
    """Batch sizes of one configuration."""
    return [job("sweep", batch_size=size, **changes) for size in sizes]


@pytest.mark.parametrize(
    ("state", "failure_class"),
    [
        (State.OUT_OF_MEMORY, FailureClass.OUT_OF_MEMORY),
        (State.FAILED, FailureClass.CRASH),
        (State.TIMED_OUT, FailureClass.HANG),
    ],
)
def test_a_worker_is_replaced_after(state: State, failure_class: FailureClass) -> None:
    cluster = busy_cluster(job("a"), job("b"), cards=1)
    [worker] = cluster.up
    commands = cluster.ends(cluster.only(), state, failure_class)
    assert [c.worker_id for c in commands if isinstance(c, StopWorker)] == [worker]
    assert not cards_of(commands)
    assert len(cards_of(cluster.stopped(worker))) == 1


def test_a_harmless_failure_leaves_the_worker() -> None:
    cluster = busy_cluster(job("a"), job("b"), cards=1)
    commands = cluster.ends(cluster.only(), State.FAILED, FailureClass.BAD_CONFIGURATION)
    assert kinds(commands) == ["RecordRow", "RunAttempt"]


def test_a_retry_comes_back_when_elsewhere_has_gone() -> None:
    cluster = busy_cluster(job("a"), job("b"), on=nodes(2, cards=1))
    first = cluster.run_of("a")
    other = cluster.run_of("b").cards[0].node_id
    cluster.ends(first, State.FAILED, FailureClass.ERROR, took=1)
    cluster.stopped()
    assert not cluster.starting  # it will not have the card it failed on
    cluster.leave(other)
    cluster.ready()
    assert cluster.running
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


@pytest.mark.parametrize("cards", [2, 3])
def test_each_retry_is_on_another_card_than_the_last(cards: int) -> None:
    """Of cards on which the job has failed, the longest ago is the best."""
    cluster = cluster_of(job(), cards=cards, card_failures=99, breaker_failures=99)
    kinds_of_failure = itertools.cycle([FailureClass.CRASH, FailureClass.COLLECTIVE])
    tried = [attempt.cards for attempt in cluster.play_out(lambda _: next(kinds_of_failure))]
    assert len(tried) == 5
    for number, at in enumerate(tried):
        assert at not in tried[max(0, number - cards + 1) : number]


def test_out_of_memory_prunes_larger_batches_that_do_not_run() -> None:
    lasts = {16: 400.0, 8: 300.0, 32: 200.0, 64: 100.0, 4: 50.0}
    jobs = [*sweep(4, 8, 16, 32, 64), job("else", batch_size=64)]
    cluster = busy_cluster(*jobs, cards=2, estimates=Fixed(by_name={"else": 10.0}, by_batch=lasts))
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
    finals = {row.job.batch_size: row for row in cluster.rows if row.final}
    assert finals[16].state is State.SUCCEEDED
    assert finals[4].state is State.SUCCEEDED
    assert cluster.finals()["else"].state is State.SUCCEEDED


def test_host_memory_that_is_short_twice_prunes_as_well() -> None:
    """Ray's memory monitor, the kernel and files that cannot be mapped are of this class."""
    cluster = busy_cluster(*sweep(4, 8), cards=1, breaker_failures=99)
    tried = cluster.play_out(FailureClass.HOST_OUT_OF_MEMORY)
    finals = {row.job.batch_size: row.state for row in cluster.rows if row.final}
    assert finals == {4: State.OUT_OF_MEMORY, 8: State.PRUNED}
    assert len(tried) == 3, "the larger one is not tried again"


def test_only_the_rank_that_failed_quarantines_its_card() -> None:
    cluster = busy_cluster(
        job("gang", cards=4), *numbered(8), cards=4, card_readmissions=0, wait_for_nodes_s=1e6
    )
    cluster.ends(cluster.only(), State.FAILED, FailureClass.ACQUIRE, ranks=(2,))
    cluster.stopped()
    cluster.ready()
    assert {run.attempt.cards[0].index for run in cluster.running.values()} == {0, 1, 3}


CARDS_FAULT = [kind for kind, policy in POLICIES.items() if policy.blame_card != "never"]


@pytest.mark.parametrize("failure_class", CARDS_FAULT)
def test_a_card_that_fails_every_job_of_a_night_is_named_and_costs_few_attempts(
    failure_class: FailureClass,
) -> None:
    """Whatever it fails with: a job that fails there and works elsewhere says so in its row."""
    cluster = cluster_of(*numbered(200), on=nodes(2), breaker_failures=999)
    [sick] = [card for card in nodes(1)[0].cards if card.index == 3]
    tried = cluster.play_out(
        lambda attempt: failure_class if attempt.cards == (sick,) else State.SUCCEEDED, took=600
    )
    assert cluster.states() == {State.SUCCEEDED}
    failed = [attempt for attempt in tried if attempt.cards == (sick,)]
    assert 1 <= len(failed) <= 6, "three, and one on probation after each quarantine but the last"
    for attempt in failed:
        assert cluster.finals()[attempt.job.dataset].reason == "measured; it failed on n1/HPU3"


def test_a_card_that_fails_every_second_job_is_quarantined_too() -> None:
    cluster = cluster_of(*numbered(120), cards=4, card_readmissions=0, breaker_failures=999)
    count = itertools.count(1)
    tried = cluster.play_out(
        lambda attempt: (
            FailureClass.ERROR
            if attempt.cards[0].index == 1 and next(count) % 2 == 0
            else State.SUCCEEDED
        )
    )
    assert cluster.states() == {State.SUCCEEDED}
    assert sum(attempt.cards[0].index == 1 for attempt in tried) < 20


def test_a_card_that_fails_at_once_is_quarantined_before_its_jobs_have_worked_elsewhere() -> None:
    """All others are busy for ten minutes, in which it could fail the whole sweep."""
    cluster = busy_cluster(*numbered(200), cards=8)
    failed = 0
    while on_sick := [r for r in cluster.running.values() if r.attempt.cards[0].index == 3]:
        cluster.ends(on_sick[0].attempt, State.FAILED, FailureClass.ERROR, took=1)
        cluster.stopped()
        cluster.ready()
        failed += 1
    assert failed == 3 and len(cluster.running) == 7


@pytest.mark.parametrize(("threshold", "quarantined"), [(3, False), (2, True)])
def test_failures_by_chance_quarantine_no_card(threshold: int, quarantined: bool) -> None:
    """Every fifth attempt fails, wherever it is: two in a row on one card are chance."""
    cluster = cluster_of(*numbered(200), card_job_failures=threshold, breaker_failures=999)
    draw = Random(5)
    cluster.play_out(lambda _: FailureClass.ERROR if draw.random() < 0.2 else State.SUCCEEDED)
    stops = [command.reason for command in cluster.log if isinstance(command, StopWorker)]
    assert any("quarantined" in reason for reason in stops) == quarantined


@pytest.mark.parametrize(
    ("failure_class", "breaker"), [(FailureClass.CARD_FAULTY, 5), (FailureClass.ACQUIRE, 999)]
)
def test_jobs_that_fail_alike_on_two_cards_are_at_fault_themselves(
    failure_class: FailureClass, breaker: int
) -> None:
    """A kernel's own illegal access reads like a broken card's, and may be all of a sweep's."""
    poison = [job(f"poison{n}") for n in range(16)]
    cluster = cluster_of(*poison, *numbered(16), cards=8, breaker_failures=breaker)
    started = cluster.now
    tried = cluster.play_out(
        lambda tried: failure_class if "poison" in str(tried.job.dataset) else State.SUCCEEDED,
        took=5,
    )
    finals = cluster.finals()
    assert all(finals[each.dataset].state is State.FAILED for each in poison)
    assert sum(row.state is State.SUCCEEDED for row in finals.values()) == 16
    assert cluster.now - started <= 5 * len(tried), "nothing waited for the end of a quarantine"


def test_a_card_that_is_quarantined_while_it_runs_loses_its_worker_afterwards() -> None:
    jobs = [job("p"), job("q"), job("r")]
    lasts = {"p": 300.0, "q": 200.0, "r": 100.0}
    cluster = busy_cluster(*jobs, cards=2, estimates=Fixed(by_name=lasts), card_job_failures=1)
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
