"""The rules of the schedule, one by one, on a cluster in the test's hands: which job runs where."""

from __future__ import annotations

import pytest
from schedule_cases import (
    Cluster,
    Fixed,
    busy_cluster,
    cards_of,
    cluster_of,
    job,
    kinds,
    node,
    nodes,
    numbered,
    planned,
)

from orchestrator.core.events import RecordRow, RunAttempt, StartWorker
from orchestrator.core.job import Accelerator, State
from orchestrator.core.plan import Action, PlannedJob


def test_unsupported_jobs_get_their_row_at_the_first_event() -> None:
    plan = [PlannedJob(job=job("no"), action=Action.UNSUPPORTED, reason="int4 on hpu")]
    cluster = Cluster([*plan, *planned(job("yes"))])
    [row] = [c for c in cluster.tick() if isinstance(c, RecordRow)]
    assert (row.state, row.reason, row.final) == (State.UNSUPPORTED, "int4 on hpu", True)
    assert row.attempt is None


@pytest.mark.parametrize("action", [Action.REUSE, Action.SKIP])
def test_what_has_a_row_already_gets_no_other(action: Action) -> None:
    cluster = Cluster([PlannedJob(job=job(), action=action)])
    assert kinds(cluster.tick()) == ["RunFinished"]
    assert cluster.rows == []


def test_a_job_that_is_planned_twice_runs_once() -> None:
    cluster = cluster_of(job("a"), job("a", experiment="other"))
    cluster.play_out()
    assert len(cluster.rows) == 1


def test_attempt_ids_go_on_where_an_earlier_invocation_stopped() -> None:
    this = job()
    cluster = busy_cluster(this, attempts_before={this.job_id: 3})
    assert cluster.only().attempt_id == f"{this.job_id}-4"


def test_longest_first() -> None:
    estimates = Fixed(by_name={"short": 5, "long": 50, "middle": 20})
    cluster = busy_cluster(job("short"), job("long"), job("middle"), cards=1, estimates=estimates)
    order = []
    while cluster.running:
        order.append(cluster.only().job.dataset)
        cluster.ends(cluster.only())
    assert order == ["long", "middle", "short"]


def test_a_worker_goes_on_with_the_model_it_holds() -> None:
    estimates = Fixed(by_name={"a1": 30, "a2": 20, "b1": 25, "b2": 25, "b3": 25})
    jobs = [job("a1"), job("a2"), *[job(n, model="other") for n in ("b1", "b2", "b3")]]
    cluster = busy_cluster(*jobs, cards=2, estimates=estimates)
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
    cluster = busy_cluster(*jobs, on=nodes(2, cards=2), estimates=Fixed(by_name=lasts))
    cluster.leave(cluster.run_of("long").cards[0].node_id)
    assert len(cluster.running) == 2  # of the other model, of which more is waiting
    cluster.ends(next(iter(cluster.running.values())).attempt, took=30)
    assert cluster.run_of("long")


def test_an_idle_worker_with_the_model_is_used_before_a_new_one_is_started() -> None:
    cluster = busy_cluster(job("a"), job("b"), on=nodes(2, cards=2), estimates=Fixed(run_s=100))
    survivor = cluster.run_of("a").cards[0].node_id
    other = "n2" if survivor == "n1" else "n1"
    cluster.ends(cluster.run_of("a"))
    commands = cluster.leave(other)
    assert [type(c) for c in commands if not isinstance(c, RecordRow)] == [RunAttempt]
    assert cluster.only().job.dataset == "b"
    assert cluster.only().cards[0].node_id == survivor


def test_an_idle_worker_takes_another_model_before_a_new_worker_is_started() -> None:
    jobs = [job("x", model="x"), job("y", model="y")]
    cluster = busy_cluster(*jobs, on=[node("n1", cards=2), node("n2", cards=1)])
    gone = cluster.run_of("x").cards[0].node_id
    stays = "y" if gone == "n2" else "x"
    goes = "x" if stays == "y" else "y"
    cluster.ends(cluster.run_of(stays))
    commands = cluster.leave("n2")
    assert not cards_of(commands)
    assert cluster.run_of(goes).cards[0].node_id == "n1"


def test_a_job_does_not_wait_for_a_worker_that_overruns() -> None:
    estimates = Fixed(load_s=0.1, by_name={"a": 4.0, "b": 2.0})
    cluster = busy_cluster(job("a"), job("b"), cards=2, estimates=estimates, max_starting=1)
    assert cluster.only().job.dataset == "a"
    assert not cluster.starting
    waited = 0
    while not cluster.starting:
        waited += 1
        assert waited < 20
        cluster.to_next_wake()
    assert cluster.only().job.dataset == "a"


def test_no_worker_is_started_for_work_that_is_done_sooner_without() -> None:
    cluster = busy_cluster(
        *numbered(4), estimates=Fixed(run_s=0.5, load_s=0.1), worker_start_s=8.0, max_starting=1
    )
    cluster.play_out()
    assert len([c for c in cluster.log if isinstance(c, StartWorker)]) == 1


def test_no_more_workers_than_jobs_are_started() -> None:
    cluster = Cluster(planned(*numbered(3)))
    assert len(cards_of(cluster.join(node()))) == 3


def test_new_workers_are_spread_over_the_nodes() -> None:
    """Neighbours share a host's cores and memory bandwidth."""
    cluster = Cluster(planned(*numbered(4)))
    cards = cards_of(cluster.join(node("n1"), node("n2"), node("n3"), node("n4")))
    assert sorted(card.node_id for card in cards) == ["n1", "n2", "n3", "n4"]


def test_only_so_many_workers_start_at_once() -> None:
    """Eight processes importing together on two cores take a minute."""
    cluster = cluster_of(*numbered(8), max_starting=2)
    assert len(cluster.starting) == 2
    cluster.ready(next(iter(cluster.starting)))
    assert len(cluster.starting) == 2


def test_isolated_jobs_get_a_process_of_their_own() -> None:
    cluster = cluster_of(*[job(n, isolation="process") for n in "abc"], cards=1)
    workers = []
    while cluster.finished is None:
        workers += list(cluster.starting)
        cluster.ready()
        commands = cluster.ends(cluster.only())
        assert kinds(commands) == ["RecordRow", "StopWorker"]
        cluster.stopped()
    assert len(set(workers)) == 3


def test_jobs_go_to_cards_of_their_kind() -> None:
    kinds_of = {kind: job(kind.value, accelerator=kind) for kind in Accelerator}
    cluster = busy_cluster(
        *kinds_of.values(), on=[node(kind.value, accelerator=kind) for kind in Accelerator]
    )
    placed = {run.attempt.job.dataset: run.attempt.cards[0] for run in cluster.running.values()}
    assert {name: card.accelerator.value for name, card in placed.items()} == {
        kind.value: kind.value for kind in Accelerator
    }
