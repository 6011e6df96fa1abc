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


def attempt_of(this: Job, *cards: Card, number: int = 1) -> Attempt:
    return Attempt(
        attempt_id=f"{this.job_id}-{number}",
        job_id=this.job_id,
        number=number,
        job=this,
        cards=cards,
    )


def row_of(this: Job, attempt: Attempt | None = None, **changes: object) -> RecordRow:
    fields = {"state": State.SUCCEEDED, "reason": "", "final": True} | changes
    return RecordRow(job=this, attempt=attempt, **fields)  # type: ignore[arg-type]


def worker_on(cluster: Cluster, this: Card) -> str:
    return next(name for name, start in cluster.up.items() if start.card == this)


def run_on(cluster: Cluster, this: Job, where: Card, number: int = 1) -> RunAttempt:
    """The job on the worker of this card."""
    attempt = attempt_of(this, where, number=number)
    return RunAttempt(attempt=attempt, worker_ids=(worker_on(cluster, where),))


def start_on_free_card(cluster: Cluster) -> StartWorker:
    used = [start.card for start in cluster.up.values()]
    return StartWorker(worker_id="w", card=next(c for c in map(card, range(4)) if c not in used))


def not_ready(cluster: Cluster) -> list[Command]:
    start = start_on_free_card(cluster)
    return [start, RunAttempt(attempt=attempt_of(job("new"), start.card), worker_ids=("w",))]


def after(
    ends: str, then: str, *, final: bool = True, number: int = 1, replicate: int = 1
) -> Callable[[Cluster], list]:
    """An attempt ends, has its row, and its worker runs a job."""

    def breach(cluster: Cluster) -> list[Command]:
        ended = end(cluster, ends)
        again = run_on(cluster, job(then, replicate=replicate), ended.cards[0], number)
        return [row_of(ended.job, ended, final=final), again]

    return breach


def end(cluster: Cluster, name: str) -> Attempt:
    """An attempt ends, and the schedule is not asked about it."""
    attempt = cluster.run_of(name)
    outcome = Outcome(attempt_id=attempt.attempt_id, state=State.SUCCEEDED, ranks=())
    cluster.invariants.observe(AttemptEnded(at=cluster.now, outcome=outcome))
    return attempt


def limited(breach: Callable[[Cluster], list], **limits: float) -> Callable[[Cluster], list]:
    """The breach under limits that are so many seconds from now; a job takes 100 s."""

    def act(cluster: Cluster) -> list[Command]:
        for name, seconds in limits.items():
            setattr(cluster.invariants, name, cluster.now + seconds)
        cluster.invariants.lasts_s = lambda _: 100.0
        return breach(cluster)

    return act


def commands(*these: Command) -> Callable[[Cluster], list]:
    return lambda cluster: list(these)


def stop_one(cluster: Cluster) -> list[Command]:
    return [StopWorker(worker_id=next(iter(cluster.up)), reason="")]


#: Those that ``tests/night/defences.py`` shows are left out.
BREACHES: dict[str, Callable[[Cluster], list]] = {
    "no such card": commands(StartWorker(worker_id="w", card=card(7))),
    "unknown worker": commands(StopWorker(worker_id="nobody", reason="")),
    "stopped twice": lambda cluster: stop_one(cluster) * 2,
    "a worker is busy": lambda cluster: [run_on(cluster, job("new"), cluster.run_of("a").cards[0])],
    "is not ready": not_ready,
    "runs twice at once": after("b", "a", number=2),
    "used again before the row": lambda cluster: [
        run_on(cluster, job("new"), end(cluster, "a").cards[0])
    ],
    "final row while it runs": commands(row_of(job("a"))),
    "final row in state RUNNING": commands(row_of(job("other"), state=State.RUNNING)),
    "runs after its final row": after("a", "a", number=2),
    "attempt id used twice": after("a", "a", final=False),
    "a process runs two replicates": after("a", "new", replicate=2),
    "a worker is started after the time for work": limited(
        lambda cluster: [start_on_free_card(cluster)], work_until=0
    ),
    "runs after the time for work": limited(after("a", "new"), work_until=0),
    "cannot end in time": limited(after("a", "new"), work_until=99),
    "goes on after its time": limited(stop_one, over_by=-1),
    "finished with workers left": commands(RunFinished(reason="")),
}


@pytest.mark.parametrize(("says", "breach"), BREACHES.items(), ids=BREACHES)
def test_a_breach_is_reported(says: str, breach: Callable[[Cluster], list]) -> None:
    """Of a run on four cards, of which one or two have an idle worker or none."""
    cluster = busy_cluster(job("a"), job("b"), cards=4)
    given = breach(cluster)
    with pytest.raises(InvariantViolated, match=says):
        cluster.invariants.check(given)


def test_a_gang_with_wrong_ranks_is_reported() -> None:
    cluster = Cluster(planned(job("gang", cards=2)))
    starts = [c for c in cluster.join(node(cards=2)) if isinstance(c, StartWorker)]
    for start in starts:
        cluster.invariants.processes[start.worker_id].ready = True
    attempt = attempt_of(job("gang", cards=2), card(1), card(0))
    swapped = RunAttempt(attempt=attempt, worker_ids=(starts[1].worker_id, starts[0].worker_id))
    with pytest.raises(InvariantViolated, match="wrong rank"):
        cluster.invariants.check([swapped])


def test_the_end_is_checked() -> None:
    with pytest.raises(InvariantViolated, match="1 jobs were lost, such as"):
        Invariants(finished=True).check_end(["0123"])
    with pytest.raises(InvariantViolated, match="after RunFinished"):
        Invariants().check([RunFinished(reason=""), row_of(job())])


def test_legal_sets_are_groups_of_a_server_or_whole_servers() -> None:
    nodes = {"n1": node("n1"), "n2": node("n2")}
    for indices, legal in (((0,), True), ((0, 1), True), ((1, 2), False), ((2, 3, 4, 5), False)):
        assert is_legal(tuple(map(card, indices)), nodes) is legal
    both = tuple(card(index, name) for name in nodes for index in range(8))
    assert is_legal(both, nodes)
    assert not is_legal(both[:12], nodes)
    assert not is_legal(both, {"n1": node("n1")})
