"""The check of the check: each rule of ``invariants.py`` refuses what breaks it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from schedule_cases import Cluster, busy_cluster, job, node, planned

from orchestrator.core.events import (
    AttemptEnded,
    Command,
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
    return busy_cluster(*[job(name) for name in names], cards=4)


def end(cluster: Cluster, name: str) -> Attempt:
    """An attempt ends, and the schedule is not asked about it."""
    attempt = cluster.run_of(name)
    outcome = Outcome(attempt_id=attempt.attempt_id, state=State.SUCCEEDED, ranks=())
    cluster.invariants.observe(AttemptEnded(at=cluster.now, outcome=outcome))
    return attempt


def worker_on(cluster: Cluster, this: Card) -> str:
    return next(name for name, start in cluster.up.items() if start.card == this)


def run_on(cluster: Cluster, this: Job, where: Card, number: int = 1) -> RunAttempt:
    """The job on the worker of this card."""
    attempt = attempt_of(this, where.index, number=number)
    return RunAttempt(attempt=attempt, worker_ids=(worker_on(cluster, where),))


def row_of(attempt: Attempt, state: State = State.SUCCEEDED, *, final: bool = True) -> RecordRow:
    return RecordRow(job=attempt.job, state=state, reason="", final=final, attempt=attempt)


def a_worker_that_is_not_ready_gets_an_attempt(cluster: Cluster) -> list:
    free = next(n for n in range(4) if all(s.card != card(n) for s in cluster.up.values()))
    run = RunAttempt(attempt=attempt_of(job("new"), free), worker_ids=("w",))
    return [StartWorker(worker_id="w", card=card(free)), run]


def a_job_runs_twice_at_once(cluster: Cluster) -> list:
    ended = end(cluster, "b")
    return [row_of(ended), run_on(cluster, job("a"), ended.cards[0], number=2)]


def a_job_runs_after_its_final_row(cluster: Cluster) -> list:
    ended = end(cluster, "a")
    return [row_of(ended), run_on(cluster, job("a"), ended.cards[0], number=2)]


def an_attempt_id_is_used_twice(cluster: Cluster) -> list:
    ended = end(cluster, "a")
    return [row_of(ended, final=False), run_on(cluster, job("a"), ended.cards[0])]


def a_process_runs_two_replicates(cluster: Cluster) -> list:
    ended = end(cluster, "a")
    return [row_of(ended), run_on(cluster, job("new", replicate=2), ended.cards[0])]


def commands(*these: Command) -> Callable[[Cluster], list]:
    return lambda cluster: list(these)


#: Those that ``tests/night/defences.py`` shows are left out.
BREACHES: dict[str, Callable[[Cluster], list]] = {
    "no such card": commands(StartWorker(worker_id="w", card=card(7))),
    "unknown worker": commands(StopWorker(worker_id="nobody", reason="")),
    "stopped twice": lambda cluster: [StopWorker(worker_id=next(iter(cluster.up)), reason="")] * 2,
    "a worker is busy": lambda cluster: [run_on(cluster, job("new"), cluster.run_of("a").cards[0])],
    "is not ready": a_worker_that_is_not_ready_gets_an_attempt,
    "runs twice at once": a_job_runs_twice_at_once,
    "used again before the row": lambda cluster: [
        run_on(cluster, job("new"), end(cluster, "a").cards[0])
    ],
    "final row while it runs": commands(final(job("a"))),
    "final row in state RUNNING": commands(final(job("other"), State.RUNNING)),
    "runs after its final row": a_job_runs_after_its_final_row,
    "attempt id used twice": an_attempt_id_is_used_twice,
    "a process runs two replicates": a_process_runs_two_replicates,
}


@pytest.mark.parametrize(("says", "breach"), BREACHES.items(), ids=BREACHES)
def test_a_breach_is_reported(says: str, breach: Callable[[Cluster], list]) -> None:
    cluster = running("a", "b")
    given = breach(cluster)
    with pytest.raises(InvariantViolated, match=says):
        cluster.invariants.check(given)


def test_a_gang_with_wrong_ranks_is_reported() -> None:
    cluster = Cluster(planned(job("gang", cards=2)))
    starts = [c for c in cluster.join(node(cards=2)) if isinstance(c, StartWorker)]
    for start in starts:
        cluster.invariants.processes[start.worker_id].ready = True
    attempt = attempt_of(job("gang", cards=2), 1, 0)
    swapped = RunAttempt(attempt=attempt, worker_ids=(starts[1].worker_id, starts[0].worker_id))
    with pytest.raises(InvariantViolated, match="wrong rank"):
        cluster.invariants.check([swapped])


def test_a_job_without_a_final_row_is_lost() -> None:
    invariants = Invariants(finished=True)
    with pytest.raises(InvariantViolated, match="1 jobs were lost, such as"):
        invariants.check_end(["0123"])


def test_a_command_after_the_end_is_reported() -> None:
    invariants = Invariants()
    with pytest.raises(InvariantViolated, match="after RunFinished"):
        invariants.check([RunFinished(reason=""), final(job())])


@pytest.mark.parametrize(
    ("indices", "legal"),
    [((0,), True), ((0, 1), True), ((1, 2), False), ((4, 5, 6, 7), True), ((2, 3, 4, 5), False)],
)
def test_legal_sets_of_a_gaudi_server(indices: tuple[int, ...], legal: bool) -> None:
    assert is_legal(tuple(card(index) for index in indices), {"n1": node()}) is legal


def test_legal_sets_over_several_servers_are_whole_ones() -> None:
    nodes = {"n1": node("n1"), "n2": node("n2")}
    both = tuple(card(index, name) for name in nodes for index in range(8))
    assert is_legal(both, nodes)
    assert not is_legal(both[:12], nodes)
    assert not is_legal(both, {"n1": node("n1")})


def test_a_deadline_is_checked() -> None:
    early = running("a")
    early.invariants.work_until = early.now
    with pytest.raises(InvariantViolated, match="a worker is started after the time for work"):
        early.invariants.check([StartWorker(worker_id="late", card=card(3))])
    ended = end(early, "a")
    early.invariants.check([RecordRow(job=job("a"), state=State.SUCCEEDED, reason="", final=True)])
    again = run_on(early, job("b"), card(0))
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
