"""Workers that do not start, cards in quarantine, and nodes that come and go."""

from __future__ import annotations

import pytest
from schedule_cases import Cluster, busy_cluster, cards_of, cluster_of, job, node, nodes, planned

from orchestrator.core.events import MoreCards, StopWorker
from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import Failure, FailureClass
from orchestrator.core.topology import Node

ACQUIRE = Failure(FailureClass.ACQUIRE, "card is held by pid 7")


def test_a_quarantined_card_is_tried_after_times_that_double_and_in_the_end_no_more() -> None:
    cluster = cluster_of(
        job(), cards=1, card_failures=2, card_readmissions=2, quarantine_s=100, card_rest_s=1
    )
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    cluster.tick(1)
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    assert not cards_of(cluster.tick(99))
    assert len(cards_of(cluster.tick(1))) == 1
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    assert not cards_of(cluster.tick(199))
    assert len(cards_of(cluster.tick(1))) == 1
    cluster.stopped(*cluster.starting, failure=ACQUIRE)
    assert not cards_of(cluster.tick(899)) and cluster.finished is None
    cluster.tick(1)
    row = cluster.finals()["a"]
    assert row.state is State.LOST
    assert "no 1 HPU cards" in row.reason and "0 usable cards" in row.reason


def test_a_gang_of_which_one_worker_does_not_start_is_stopped_and_retried() -> None:
    cluster = cluster_of(
        job("gang", cards=4), on=[node(cards=8, node_id="4d24176d4c61209a", name="hpu-1")]
    )
    dead, *others = cluster.starting
    cards = {start.card for start in cluster.starting.values()}
    cluster.ready(others[0])
    commands = cluster.stopped(dead, failure=ACQUIRE)
    assert {c.worker_id for c in commands if isinstance(c, StopWorker)} == set(others)
    [row] = cluster.rows
    assert not row.final and "did not start" in row.reason
    assert row.reason.startswith("hpu-1/HPU")
    cluster.stopped()
    cluster.tick(10)
    assert not cards & {start.card for start in cluster.starting.values()}
    cluster.play_out()
    assert cluster.finals()["gang"].state is State.SUCCEEDED


def test_a_job_whose_workers_never_start_is_given_up() -> None:
    cluster = cluster_of(
        job("gang", cards=2), max_start_failures=3, card_failures=99, breaker_failures=99
    )
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


def test_a_late_result_is_kept_but_not_counted() -> None:
    cluster = busy_cluster(job("a"), job("b"), on=nodes(2, cards=1))
    lost = cluster.run_of("a")
    cluster.leave(lost.cards[0].node_id)
    [row] = cluster.rows
    assert (row.state, row.final) == (State.LOST, False)
    cluster.ends(cluster.run_of("b"))
    again = cluster.run_of("a")
    assert again.number == 2
    cluster.ends(again)
    assert cluster.finished is None
    rows = len(cluster.rows)
    cluster.ends(lost)
    late = cluster.rows[rows:]
    assert [(row.final, row.state) for row in late] == [(False, State.SUCCEEDED)]
    assert cluster.finals()["a"].attempt == again
    assert cluster.schedule.counts()[State.SUCCEEDED] == 2


def test_a_gang_that_loses_one_node_leaves_the_other_free() -> None:
    cluster = busy_cluster(
        job("gang", cards=4), job("s"), on=nodes(2, cards=2), wait_for_nodes_s=10
    )
    assert cluster.only().job.dataset == "gang"
    commands = cluster.leave("n2")
    assert len([c for c in commands if isinstance(c, StopWorker)]) == 2
    cluster.play_out()
    finals = cluster.finals()
    assert (finals["gang"].state, finals["s"].state) == (State.LOST, State.SUCCEEDED)


FAULTY = Failure(FailureClass.CARD_FAULTY, "a product has 3 wrong elements")


def test_a_node_on_which_half_of_the_cards_fail_is_quarantined() -> None:
    jobs = [job(f"j{number}") for number in range(16)]
    cluster = cluster_of(*jobs, on=[node("bad")], quarantine_s=100, breaker_failures=99)
    cluster.join(node("good"))
    on_bad = [w for w, start in cluster.starting.items() if start.card.node_id == "bad"]
    assert len(on_bad) == 8
    stopped = [
        command
        for worker in on_bad[:4]
        for command in cluster.stopped(worker, failure=FAULTY)
        if isinstance(command, StopWorker)
    ]
    assert {command.worker_id for command in stopped} == set(on_bad[4:])
    assert all("4 cards of bad failed" in command.reason for command in stopped)
    cluster.stopped(*on_bad[4:])
    assert not cards_of(cluster.tick(99))
    assert {each.node_id for each in cards_of(cluster.tick(1))} == {"bad"}
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


APART = [
    node("shaky", node_id=node_id, card_indices=(number,), server_cards=3)
    for number, node_id in enumerate(("id", "id+1", "id+2"))
]


@pytest.mark.parametrize("parts", [[node("shaky", cards=1)], APART], ids=["whole", "claimed apart"])
def test_a_node_that_is_lost_again_and_again_has_to_wait(parts: list[Node]) -> None:
    cluster = Cluster(planned(job()), quarantine_s=100, wait_for_nodes_s=1000, node_failures=3)
    for _ in range(3):
        assert len(cards_of(cluster.join(*parts))) == 1
        for part in parts:
            cluster.leave(part.node_id)
    assert not cards_of(cluster.join(*parts))
    assert len(cards_of(cluster.tick(100))) == 1
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


def test_cards_that_are_lost_alone_again_and_again_have_to_wait() -> None:
    cluster = cluster_of(
        job("wide", cards=2),
        on=[node("shaky", node_id="id", card_indices=(0,), server_cards=4)],
        quarantine_s=100,
        node_failures=3,
    )
    rest = node("shaky", node_id="id+1", card_indices=(2, 3), server_cards=4)
    for _ in range(3):
        assert len(cards_of(cluster.join(rest))) == 2
        cluster.leave(rest.node_id)
    assert not cards_of(cluster.join(rest))


def test_waiting_ends_with_the_deadline() -> None:
    cluster = Cluster(planned(job()), wait_for_nodes_s=30, work_until=1500.0)
    cluster.see(MoreCards(at=cluster.now, kinds=frozenset({Accelerator.HPU})))
    cluster.tick(600)
    assert cluster.finals()["a"].state is State.NOT_STARTED and cluster.finished is not None


def test_a_node_that_leaves_in_a_silence_is_waited_for_until_after_it() -> None:
    """Patience begins when the store answers: 903 jobs were lost in a rehearsal, 14 s after it
    did."""
    cluster = cluster_of(job(), on=[node("n1")], wait_for_nodes_s=30)
    cluster.see(MoreCards(at=cluster.now, kinds=frozenset(Accelerator)))
    cluster.leave("n1")
    cluster.tick(600)
    assert not cluster.finals()
    assert not cluster.schedule.without_cards(cluster.now)
    cluster.see(MoreCards(at=cluster.now, kinds=frozenset()))
    notice = cluster.schedule.without_cards(cluster.now)
    assert "1 job of 1 HPU card: none is left" in notice and "after 30s" in notice
    cluster.tick(29)
    assert not cluster.finals()
    cluster.tick(1)
    assert cluster.finals()["a"].state is State.LOST
    assert not cluster.schedule.without_cards(cluster.now)


def test_a_run_whose_nodes_are_starting_has_a_minute_before_it_is_said() -> None:
    cluster = Cluster(planned(job()))
    cluster.tick()
    assert not cluster.schedule.without_cards(cluster.now + 59)
    assert "none is left to run on" in cluster.schedule.without_cards(cluster.now + 60)
