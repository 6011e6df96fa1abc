"""The rules of the schedule, one by one, on a cluster in the test's hands: which job runs where."""

from __future__ import annotations

from schedule_cases import (
    Cluster,
    Fixed,
    busy_cluster,
    cards_of,
    cluster_of,
    job,
    node,
    nodes,
    numbered,
    planned,
)

from orchestrator.core.events import MoreCards, RecordRow, RunAttempt, StartWorker
from orchestrator.core.job import Accelerator, State
from orchestrator.core.plan import Action, PlannedJob


def test_unsupported_jobs_get_their_row_at_the_first_event() -> None:
    plan = [PlannedJob(job=job("no"), action=Action.UNSUPPORTED, reason="int4 on hpu")]
    cluster = Cluster([*plan, *planned(job("yes"))])
    [row] = [c for c in cluster.tick() if isinstance(c, RecordRow)]
    assert (row.state, row.reason, row.final) == (State.UNSUPPORTED, "int4 on hpu", True)
    assert row.attempt is None


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
    cluster = busy_cluster(job("a"), job("b"), cards=1, estimates=estimates)
    cluster.join(node("n2", cards=1))
    assert cluster.only().job.dataset == "a"
    assert not cluster.starting
    waited = 0
    while not cluster.starting:
        waited += 1
        assert waited < 20
        cluster.to_next_wake()
    assert cluster.only().job.dataset == "a"


def test_no_worker_is_started_for_work_that_is_done_sooner_without() -> None:
    cluster = busy_cluster(*numbered(4), cards=1, estimates=Fixed(run_s=0.5, load_s=0.1))
    cluster.join(node("n2"))
    cluster.play_out(took=0.5)
    assert len([c for c in cluster.log if isinstance(c, StartWorker)]) == 1


def test_new_workers_are_spread_over_the_nodes() -> None:
    """Neighbours share a host's cores and memory bandwidth."""
    cluster = Cluster(planned(*numbered(4)))
    cards = cards_of(cluster.join(node("n1"), node("n2"), node("n3"), node("n4")))
    assert sorted(card.node_id for card in cards) == ["n1", "n2", "n3", "n4"]


def test_jobs_go_to_cards_of_their_kind() -> None:
    kinds_of = {kind: job(kind.value, accelerator=kind) for kind in Accelerator}
    cluster = busy_cluster(
        *kinds_of.values(), on=[node(kind.value, accelerator=kind) for kind in Accelerator]
    )
    placed = {run.attempt.job.dataset: run.attempt.cards[0] for run in cluster.running.values()}
    assert {name: card.accelerator.value for name, card in placed.items()} == {
        kind.value: kind.value for kind in Accelerator
    }


# ---------------------------------------------------------------- gangs


def test_a_job_wider_than_a_node_takes_several_whole_ones() -> None:
    cluster = cluster_of(job("gang", cards=16), on=nodes(2))
    starts = list(cluster.starting.values())
    assert [s.local_rank for s in starts] == [*range(8), *range(8)]
    assert [s.rank for s in starts] == list(range(16))
    assert {s.gang for s in starts} == {tuple(range(8))}  # those of its own server
    cluster.play_out()
    assert cluster.finals()["gang"].state is State.SUCCEEDED


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


def test_backfill_takes_only_what_ends_in_time() -> None:
    jobs = [job(name) for name in ("long", "late", "soon", "tiny", "big")]
    lasts = {"gang": 100, "long": 90, "late": 75, "soon": 20, "tiny": 15, "big": 80}
    estimates = Fixed(load_s=0, by_name=lasts)
    cluster = busy_cluster(
        job("gang", cards=2), *jobs, on=nodes(2, cards=2), estimates=estimates, worker_start_s=1.0
    )
    home = cluster.run_of("gang").cards[0].node_id
    assert {run.attempt.job.dataset for run in cluster.running.values()} == {"gang", "long", "big"}
    cluster.leave(home)
    cluster.ends(cluster.run_of("big"), took=20)  # ahead of time: 70 s until "long" ends
    assert cluster.run_of("soon").cards[0].node_id != home
    cluster.ends(cluster.run_of("soon"), took=20)
    assert cluster.run_of("tiny")
    cluster.ends(cluster.run_of("tiny"), took=15)
    assert {run.attempt.job.dataset for run in cluster.running.values()} == {"long"}
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
