"""The check of the check: each rule of ``invariants.py`` refuses what breaks it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from schedule_cases import Cluster, job, node, planned

from orchestrator.core.events import (
    AttemptEnded,
    RecordRow,
    RunAttempt,
    RunFinished,
    StartWorker,
    StopWorker,
)
from orchestrator.core.job import Accelerator, Job, State
from orchestrator.core.outcome import Attempt, Outcome
from orchestrator.core.topology import Card
from orchestrator.scheduler.invariants import Invariants, InvariantViolated, is_legal


def card(index: int, node_id: str = "n1") -> Card:
    return Card(node_id=node_id, index=index, accelerator=Accelerator.HPU)


def attempt_of(this: Job, *indices: int, number: int = 1) -> Attempt:
    return Attempt(
        attempt_id=f"{this.job_id}-{number}",
        job_id=this.job_id,
        number=number,
        job=this,
        cards=tuple(card(index) for index in indices),
    )


def final(this: Job, state: State = State.SUCCEEDED) -> RecordRow:
    return RecordRow(job=this, state=state, reason="", final=True)


def running(*names: str) -> Cluster:
    """One-card jobs that run on a node of four cards, one of them idle or vacant."""
    cluster = Cluster(planned(*[job(name) for name in names]))
    cluster.join(node(cards=4))
    cluster.ready()
    return cluster


def end(cluster: Cluster, name: str) -> Attempt:
    """An attempt ends, and the schedule is not asked about it."""
    attempt = cluster.run_of(name)
    outcome = Outcome(attempt_id=attempt.attempt_id, state=State.SUCCEEDED, ranks=())
    cluster.invariants.observe(AttemptEnded(at=cluster.now, outcome=outcome))
    return attempt


def worker_on(cluster: Cluster, this: Card) -> str:
    return next(name for name, start in cluster.up.items() if start.card == this)


def two_workers_on_a_card(cluster: Cluster) -> list:
    return [StartWorker(worker_id="rival", card=cluster.run_of("a").cards[0])]


def a_card_that_is_not_there(cluster: Cluster) -> list:
    return [StartWorker(worker_id="w", card=card(7))]


def an_unknown_worker_is_stopped(cluster: Cluster) -> list:
    return [StopWorker(worker_id="nobody", reason="")]


def a_worker_is_stopped_twice(cluster: Cluster) -> list:
    return [StopWorker(worker_id=next(iter(cluster.up)), reason="")] * 2


def a_busy_worker_gets_another_attempt(cluster: Cluster) -> list:
    where = cluster.run_of("a").cards[0]
    attempt = attempt_of(job("new"), where.index)
    return [RunAttempt(attempt=attempt, worker_ids=(worker_on(cluster, where),))]


def a_worker_that_is_not_ready_gets_an_attempt(cluster: Cluster) -> list:
    free = next(n for n in range(4) if all(s.card != card(n) for s in cluster.up.values()))
    return [
        StartWorker(worker_id="w", card=card(free)),
        RunAttempt(attempt=attempt_of(job("new"), free), worker_ids=("w",)),
    ]


def a_job_runs_twice_at_once(cluster: Cluster) -> list:
    end(cluster, "b")
    where = cluster.run_of("b").cards[0]
    again = attempt_of(job("a"), where.index, number=2)
    row = RecordRow(
        job=job("b"),
        state=State.SUCCEEDED,
        reason="",
        final=True,
        attempt=cluster.run_of("b"),
    )
    return [row, RunAttempt(attempt=again, worker_ids=(worker_on(cluster, where),))]


def a_card_is_used_before_the_row(cluster: Cluster) -> list:
    where = end(cluster, "a").cards[0]
    attempt = attempt_of(job("new"), where.index)
    return [RunAttempt(attempt=attempt, worker_ids=(worker_on(cluster, where),))]


def a_job_gets_two_final_rows(cluster: Cluster) -> list:
    end(cluster, "a")
    return [final(job("a")), final(job("a"))]


def a_job_ends_while_it_runs(cluster: Cluster) -> list:
    return [final(job("a"))]


def a_final_row_is_not_terminal(cluster: Cluster) -> list:
    return [final(job("other"), State.RUNNING)]


def a_job_runs_after_its_final_row(cluster: Cluster) -> list:
    attempt = end(cluster, "a")
    where = attempt.cards[0]
    row = RecordRow(job=job("a"), state=State.SUCCEEDED, reason="", final=True, attempt=attempt)
    again = attempt_of(job("a"), where.index, number=2)
    return [row, RunAttempt(attempt=again, worker_ids=(worker_on(cluster, where),))]


def an_attempt_id_is_used_twice(cluster: Cluster) -> list:
    attempt = end(cluster, "a")
    row = RecordRow(job=job("a"), state=State.FAILED, reason="", final=False, attempt=attempt)
    worker = worker_on(cluster, attempt.cards[0])
    return [row, RunAttempt(attempt=attempt, worker_ids=(worker,))]


def an_isolated_job_gets_a_used_process(cluster: Cluster) -> list:
    attempt = end(cluster, "a")
    row = RecordRow(job=job("a"), state=State.SUCCEEDED, reason="", final=True, attempt=attempt)
    isolated = attempt_of(job("new", isolation="process"), attempt.cards[0].index)
    worker = worker_on(cluster, attempt.cards[0])
    return [row, RunAttempt(attempt=isolated, worker_ids=(worker,))]


def the_end_comes_too_early(cluster: Cluster) -> list:
    return [RunFinished(reason="")]


BREACHES = [
    (two_workers_on_a_card, "has a worker already"),
    (a_card_that_is_not_there, "no such card"),
    (an_unknown_worker_is_stopped, "unknown worker"),
    (a_worker_is_stopped_twice, "stopped twice"),
    (a_busy_worker_gets_another_attempt, "a worker is busy"),
    (a_worker_that_is_not_ready_gets_an_attempt, "is not ready"),
    (a_job_runs_twice_at_once, "runs twice at once"),
    (a_card_is_used_before_the_row, "used again before the row"),
    (a_job_gets_two_final_rows, "second final row"),
    (a_job_ends_while_it_runs, "final row while it runs"),
    (a_final_row_is_not_terminal, "final row in state RUNNING"),
    (a_job_runs_after_its_final_row, "runs after its final row"),
    (an_attempt_id_is_used_twice, "attempt id used twice"),
    (an_isolated_job_gets_a_used_process, "is not fresh"),
    (the_end_comes_too_early, "finished with workers left"),
]


@pytest.mark.parametrize(("breach", "says"), BREACHES, ids=[b.__name__ for b, _ in BREACHES])
def test_a_breach_is_reported(breach: Callable[[Cluster], list], says: str) -> None:
    """Each of these must never be commanded."""
    cluster = running("a", "b")
    commands = breach(cluster)
    with pytest.raises(InvariantViolated, match=says):
        cluster.invariants.check(commands)


def test_a_gang_with_wrong_ranks_is_reported() -> None:
    """Both say that they are rank 0."""
    cluster = Cluster(planned(job("gang", cards=2)))
    starts = [c for c in cluster.join(node(cards=2)) if isinstance(c, StartWorker)]
    for start in starts:
        cluster.invariants.processes[start.worker_id].ready = True
    attempt = attempt_of(job("gang", cards=2), 1, 0)
    swapped = RunAttempt(attempt=attempt, worker_ids=(starts[1].worker_id, starts[0].worker_id))
    with pytest.raises(InvariantViolated, match="wrong rank"):
        cluster.invariants.check([swapped])


def test_a_job_without_a_final_row_is_lost() -> None:
    """At the end of a run each of its jobs has one."""
    invariants = Invariants(finished=True)
    with pytest.raises(InvariantViolated, match="1 jobs were lost, such as"):
        invariants.check_end(["0123"])


def test_a_command_after_the_end_is_reported() -> None:
    """``RunFinished`` is the last."""
    invariants = Invariants()
    with pytest.raises(InvariantViolated, match="after RunFinished"):
        invariants.check([RunFinished(reason=""), final(job())])


@pytest.mark.parametrize(
    ("indices", "legal"),
    [((0,), True), ((0, 1), True), ((1, 2), False), ((4, 5, 6, 7), True), ((2, 3, 4, 5), False)],
)
def test_legal_sets_of_a_gaudi_server(indices: tuple[int, ...], legal: bool) -> None:
    """Aligned pairs and quads only."""
    assert is_legal(tuple(card(index) for index in indices), {"n1": node()}) is legal


def test_legal_sets_over_several_servers_are_whole_ones() -> None:
    """Sixteen cards of two servers, but not twelve, and not a node that has left."""
    nodes = {"n1": node("n1"), "n2": node("n2")}
    both = tuple(card(index, name) for name in nodes for index in range(8))
    assert is_legal(both, nodes)
    assert not is_legal(both[:12], nodes)
    assert not is_legal(both, {"n1": node("n1")})


def test_a_deadline_is_checked() -> None:
    """Nothing begins after the time for work, nothing that is known to last longer begins before,
    and the run does not go on after its time."""
    early = running("a")
    early.invariants.work_until = early.now
    with pytest.raises(InvariantViolated, match="a worker is started after the time for work"):
        early.invariants.check([StartWorker(worker_id="late", card=card(3))])
    ended = end(early, "a")
    early.invariants.check([RecordRow(job=job("a"), state=State.SUCCEEDED, reason="", final=True)])
    again = RunAttempt(attempt=attempt_of(job("b"), 0), worker_ids=(worker_on(early, card(0)),))
    with pytest.raises(InvariantViolated, match="runs after the time for work"):
        early.invariants.check([again])
    early.invariants.work_until = early.now + 99
    early.invariants.lasts_s = lambda _: 100.0
    with pytest.raises(InvariantViolated, match="cannot end in time"):
        early.invariants.check([again])
    early.invariants.over_by = early.now - 1
    with pytest.raises(InvariantViolated, match="goes on after its time"):
        early.invariants.check([StopWorker(worker_id=worker_on(early, card(0)), reason="")])
    assert ended.job_id == job("a").job_id


def test_a_run_may_leave_only_what_has_not_ended_when_told() -> None:
    """For as long as its patience lasts, everything is waited for."""
    cluster = running("a")
    end(cluster, "a")
    checker = cluster.invariants
    checker.check([RecordRow(job=job("a"), state=State.SUCCEEDED, reason="", final=True)])
    checker.stop_patience_s = 60.0
    checker.check([StopWorker(worker_id=worker_id, reason="") for worker_id in cluster.up])
    with pytest.raises(InvariantViolated, match="finished with workers left"):
        checker.check([RunFinished(reason="")])
    checker.now += 60
    checker.check([RunFinished(reason="")])
