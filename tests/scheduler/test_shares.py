"""Shares of the cluster: open cards go where the work would take longest even with them."""

from __future__ import annotations

from collections import Counter

import pytest
from schedule_cases import Cluster, Fixed, job, node, planned

from benchmarks.hard_scheduling import simulated
from orchestrator.core.job import Accelerator, State
from orchestrator.scheduler.simulator import simulate


def running_widths(cluster: Cluster) -> Counter[int]:
    """Count the running jobs of each width."""
    return Counter(len(run.attempt.cards) for run in cluster.running.values())


def two_widths(*, wide: int, narrow: int, **settings: object) -> Cluster:
    """Four servers, jobs of eight cards and jobs of two, which last a little longer; the first ones
    run."""
    names = [f"narrow{n:03}" for n in range(narrow)]
    jobs = [
        *(job(f"wide{n:02}", cards=8) for n in range(wide)),
        *(job(name, cards=2) for name in names),
    ]
    estimates = Fixed(run_s=100, load_s=0, by_name=dict.fromkeys(names, 101.0))
    settings = {"worker_start_s": 1.0, "urgency": 0.0} | settings
    cluster = Cluster(planned(*jobs), estimates=estimates, **settings)
    cluster.join(*(node(f"n{n}") for n in range(4)))
    cluster.ready()
    return cluster


def test_widths_with_equal_work_share_the_cards() -> None:
    """Ten jobs of eight cards and forty of two: two servers each."""
    assert running_widths(two_widths(wide=10, narrow=40)) == {8: 2, 2: 8}


def test_most_cards_go_to_the_width_with_most_work() -> None:
    """Thirty jobs of eight cards and thirty of two: three servers and one."""
    assert running_widths(two_widths(wide=30, narrow=30)) == {8: 3, 2: 4}


def test_hardly_any_wide_work_still_has_a_set() -> None:
    """One job of eight cards is not left until the end."""
    assert running_widths(two_widths(wide=1, narrow=200)) == {8: 1, 2: 12}


def test_the_widest_go_first_before_a_deadline() -> None:
    """There, what measures most counts, not the end of the run."""
    cluster = two_widths(wide=10, narrow=40, work_until=1e9)
    assert running_widths(cluster) == {8: 4}


def test_no_card_stands_idle_while_widths_share() -> None:
    """Open cards get at once a job that fits there; a drained set is needed only near the end,
    once narrow jobs, which are favoured, have no work left."""
    cluster = two_widths(wide=20, narrow=80)
    for _ in range(60):
        run = next(iter(cluster.running.values()))
        cluster.ends(run.attempt, took=100.0 / len(cluster.running))
        cluster.stopped()
        cluster.ready()
        assert sum(width * many for width, many in running_widths(cluster).items()) == 32
    cluster.play_out()
    assert {row.state for row in cluster.finals().values()} == {State.SUCCEEDED}


def test_one_card_jobs_are_not_counted_again_for_each_server() -> None:
    """Each of many servers that come at once leaves to one-card jobs what they still lack."""
    jobs = [
        *(job(f"wide{n:02}", cards=8) for n in range(40)),
        *(job(f"s{n:02}") for n in range(64)),
    ]
    cluster = Cluster(planned(*jobs), estimates=Fixed(run_s=100, load_s=0), worker_start_s=1.0)
    cluster.join(*(node(f"n{n}") for n in range(8)))
    cluster.ready()
    assert running_widths(cluster)[8] >= 6


def starting_widths(cluster: Cluster) -> Counter[int]:
    """Count the jobs of each width whose workers start."""
    workers = Counter(start.world_size for start in cluster.starting.values())
    return Counter({width: many // width for width, many in workers.items()})


def one_server(
    *,
    gangs: int,
    singles: int,
    width: int = 2,
    load_s: float = 0.0,
    accelerator: Accelerator = Accelerator.HPU,
) -> Cluster:
    """One server, jobs of several cards and of one, which last a little longer; the first workers
    start."""
    names = [f"one{n:02}" for n in range(singles)]
    jobs = [job(f"gang{n:02}", cards=width, accelerator=accelerator) for n in range(gangs)]
    jobs += [job(name, accelerator=accelerator) for name in names]
    estimates = Fixed(run_s=60, load_s=load_s, by_name=dict.fromkeys(names, 61.0))
    cluster = Cluster(planned(*jobs), estimates=estimates, worker_start_s=1.0, urgency=0.0)
    cluster.join(node("n1", accelerator=accelerator))
    return cluster


def test_sets_of_one_server_are_left_to_narrower_jobs_one_by_one() -> None:
    """The first two that were open are enough; the next goes to a gang again."""
    assert starting_widths(one_server(gangs=20, singles=20)) == {2: 2, 1: 4}


def test_cards_on_which_a_worker_starts_are_no_rest() -> None:
    """The rest goes to gangs in the round in which those workers were started."""
    assert starting_widths(one_server(gangs=20, singles=40)) == {2: 1, 1: 6}


def test_a_card_of_several_sets_is_left_to_narrower_jobs_once() -> None:
    """Sets of three cards overlap: of five open cards no more than five are left."""
    cluster = one_server(gangs=21, singles=40, width=3, accelerator=Accelerator.GPU)
    assert starting_widths(cluster) == {3: 1, 1: 5}


def test_gangs_take_what_one_card_jobs_leave() -> None:
    """One worker is done with all jobs before a second one would have loaded the model: what was
    left to one-card jobs does not stand idle."""
    assert starting_widths(one_server(gangs=3, singles=12, load_s=1000.0))[2] == 3


def test_a_gang_that_lasts_as_long_as_any_narrower_job_goes_first() -> None:
    """Else gangs would run one after the other, while short jobs of one card have the others."""
    jobs = [job(f"gang{n}", cards=8) for n in range(4)]
    jobs += [job(f"one{n:03}") for n in range(600)]
    lasts = {f"gang{n}": 3000.0 for n in range(4)} | {f"one{n:03}": 300.0 for n in range(600)}
    found = simulate(
        planned(*jobs), [node(f"n{n}") for n in range(4)], Fixed(load_s=0, by_name=lasts)
    )
    assert found.makespan_s < 1.06 * found.bound_s


@pytest.mark.slow
def test_runs_end_soon_though_estimates_are_wrong() -> None:
    """Five jobs a card, off by up to 2.7 times in two of three cases, beside the longest estimate
    first by first fit, which pays for no starts and lets gangs starve."""
    turns = [simulated(4, 1.0, seed, 2) for seed in range(500, 504)]
    ours = sum(turn.ours / turn.bound for turn in turns) / len(turns)
    theirs = sum(turn.longest_first / turn.bound for turn in turns) / len(turns)
    assert ours < theirs + 0.03
