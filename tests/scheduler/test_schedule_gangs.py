"""Gangs: legal sets, drained for them, filled up meanwhile by what ends in time."""

from __future__ import annotations

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

from orchestrator.core.events import MoreCards, RunAttempt, StartWorker
from orchestrator.core.job import Accelerator, State


def test_a_gang_runs_when_all_its_workers_are_ready() -> None:
    cluster = Cluster(planned(job("gang", cards=4)))
    starts = [c for c in cluster.join(node()) if isinstance(c, StartWorker)]
    assert [(s.rank, s.local_rank, s.world_size) for s in starts] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 2, 4),
        (3, 3, 4),
    ]
    assert [s.card.index for s in starts] == [0, 1, 2, 3]
    assert {s.gang for s in starts} == {(0, 1, 2, 3)}
    for start in starts[:3]:
        assert not kinds(cluster.ready(start.worker_id))
    [run] = cluster.ready(starts[3].worker_id)
    assert isinstance(run, RunAttempt)
    assert run.worker_ids == tuple(s.worker_id for s in starts)


def test_the_processes_of_a_gang_are_not_used_again() -> None:
    cluster = busy_cluster(job("a", cards=2), job("b", cards=2), cards=2)
    commands = cluster.ends(cluster.only())
    assert kinds(commands) == ["RecordRow", "StopWorker", "StopWorker"]
    first, second = cluster.stopping
    assert len(cards_of(cluster.stopped(first))) == 1
    assert len(cards_of(cluster.stopped(second))) == 1


def test_a_job_wider_than_a_node_takes_several_whole_ones() -> None:
    cluster = cluster_of(job("gang", cards=16), on=nodes(2))
    starts = list(cluster.starting.values())
    assert [s.local_rank for s in starts] == [*range(8), *range(8)]
    assert [s.rank for s in starts] == list(range(16))
    assert {s.gang for s in starts} == {tuple(range(8))}  # those of its own server
    cluster.play_out()
    assert cluster.finals()["gang"].state is State.SUCCEEDED


def test_a_gang_is_not_started_on_an_illegal_set() -> None:
    cluster = cluster_of(
        job("gang", cards=2), on=[node(card_indices=(3, 4), server_cards=8)], wait_for_nodes_s=10
    )
    assert not cluster.starting
    cluster.tick(10)
    assert cluster.finals()["gang"].state is State.LOST


def test_a_gang_spans_cards_of_a_server_that_came_at_different_times() -> None:
    """Others give back the second half of a server: a gang takes all of it, with ranks and groups
    as on a server that came at once, and goes with the part that is lost."""
    cluster = Cluster(planned(job("gang", cards=8), job("pair", cards=2)), wait_for_nodes_s=30)
    first = node("n1", card_indices=(0, 1, 4, 5), server_cards=8)
    rest = node("n1", node_id="n1+1", part_of="n1", card_indices=(2, 3, 6, 7), server_cards=8)
    cluster.join(first)
    cluster.see(MoreCards(at=cluster.now, kinds=frozenset({Accelerator.HPU})))
    cluster.ready()
    cluster.ends(cluster.run_of("pair"))
    cluster.stopped()
    cluster.tick(100_000)
    assert set(cluster.finals()) == {"pair"} and not cluster.starting  # it waits for the rest
    cluster.join(rest)
    starts = list(cluster.starting.values())
    assert [(s.card.index, s.rank, s.local_rank) for s in starts] == [(n, n, n) for n in range(8)]
    assert {s.gang for s in starts} == {tuple(range(8))}
    assert {s.card.node_id for s in starts} == {"n1", "n1+1"}
    cluster.ready()
    cluster.leave("n1+1")
    assert [row.state for row in cluster.rows] == [State.SUCCEEDED, State.LOST]
    cluster.stopped()
    cluster.tick(10)
    assert not cluster.starting  # half a server is left
    cluster.join(rest)
    cluster.play_out()
    assert cluster.finals()["gang"].state is State.SUCCEEDED


def test_a_gang_never_starves_behind_one_card_jobs() -> None:
    cluster = busy_cluster(
        job("gang", cards=8),
        *numbered(60),
        on=nodes(2),
        estimates=Fixed(run_s=50.0, load_s=0, by_name={"gang": 10}),
        worker_start_s=1.0,
    )
    cluster.leave(cluster.run_of("gang").cards[0].node_id)
    ended = 0
    while not any(s.world_size == 8 for s in cluster.starting.values()):
        cluster.ends(next(iter(cluster.running.values())).attempt, took=6.0)
        cluster.stopped()
        ended += 1
    assert ended == 8  # those that ran when it came, and not one more
    cluster.play_out()


def test_backfill_takes_only_what_ends_in_time() -> None:
    jobs = [job("gang", cards=2), job("long"), job("soon"), job("tiny"), job("big")]
    lasts = {"gang": 100, "long": 90, "soon": 20, "tiny": 15, "big": 80}
    cluster = busy_cluster(
        *jobs, on=nodes(2, cards=2), estimates=Fixed(load_s=0, by_name=lasts), worker_start_s=1.0
    )
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
    jobs = [job("gang", cards=2), job("a"), job("b"), job("late")]
    lasts = {"gang": 200, "a": 90, "b": 80, "late": 75}
    cluster = busy_cluster(
        *jobs, on=nodes(2, cards=2), estimates=Fixed(load_s=0, by_name=lasts), worker_start_s=1.0
    )
    cluster.leave(cluster.run_of("gang").cards[0].node_id)
    cluster.ends(cluster.run_of("b"), took=80)  # "a" has 10 s left, "late" takes 75
    assert {run.attempt.job.dataset for run in cluster.running.values()} == {"a"}
    cluster.ends(cluster.run_of("a"), took=10)
    cluster.stopped()
    assert {s.world_size for s in cluster.starting.values()} == {2}
    cluster.play_out()
    assert cluster.states() == {State.SUCCEEDED}


def test_gangs_go_first_and_narrow_jobs_fill_up() -> None:
    jobs = [job("one"), job("four", cards=4), job("eight", cards=8), job("two", cards=2)]
    cluster = busy_cluster(*jobs, on=nodes(2))
    homes = {
        run.attempt.job.dataset: {card.node_id for card in run.attempt.cards}
        for run in cluster.running.values()
    }
    assert set(homes) == {"one", "two", "four", "eight"}
    assert homes["one"] == homes["two"] == homes["four"] != homes["eight"]


def test_one_card_jobs_are_packed_while_gangs_wait() -> None:
    jobs = [job("gang", cards=16), *[job(f"s{n}") for n in range(2)]]
    lasts = {"gang": 10.0, "s0": 500.0, "s1": 500.0}
    cluster = cluster_of(*jobs, on=[node("n1")], estimates=Fixed(by_name=lasts), worker_start_s=1.0)
    cards = [start.card for start in cluster.starting.values()]
    assert len(cards) == 2
    assert {card.index // 2 for card in cards} == {0}


def test_a_job_as_long_as_all_the_rest_goes_before_wider_ones() -> None:
    jobs = [job("marathon"), *[job(f"g{n}", cards=8) for n in range(6)]]
    lasts = {"marathon": 1000.0}
    cluster = busy_cluster(*jobs, on=nodes(2), estimates=Fixed(run_s=100, by_name=lasts))
    assert cluster.run_of("marathon")
    assert len(cluster.running) == 2
