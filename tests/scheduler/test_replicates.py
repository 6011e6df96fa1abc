"""Replicates of a cell: fresh processes, other cards, and an order that a seed draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import Fixed, busy_cluster, job, node, numbered
from simulated_runs import Scattered, thorough

from orchestrator.core.job import Job, State
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.core.topology import Card, Node
from orchestrator.scheduler.deadline import anchors
from orchestrator.scheduler.scheduler import ScheduleSettings
from orchestrator.scheduler.simulator import Faults, SimulationResult, SimulationSettings, simulate

QUIET = SimulationSettings(noise=0.0, start_s=8.0, stop_s=0.5)


def replicated(jobs: Iterable[Job], times: int) -> list[PlannedJob]:
    """Each job so many times, as a grid expands it."""
    jobs = list(jobs)
    return [
        PlannedJob(job=replace(each, replicate=number), action=Action.RUN)
        for number in range(1, times + 1)
        for each in jobs
    ]


def play(
    jobs: Sequence[PlannedJob], nodes: Sequence[Node], seed: int = 0, load_s: float = 10.0
) -> SimulationResult:
    """A night without faults in which every job takes a hundred seconds."""
    return simulate(
        jobs,
        nodes,
        Fixed(run_s=100, load_s=load_s),
        settings=QUIET,
        schedule_settings=ScheduleSettings(seed=seed),
    )


def cards_of(result: SimulationResult) -> dict[str, list[tuple[Card, ...]]]:
    """The card sets that each cell was on."""
    found: dict[str, list[tuple[Card, ...]]] = defaultdict(list)
    for row in result.rows:
        assert row.state is State.SUCCEEDED
        assert row.attempt is not None
        found[row.job.cell_id].append(row.attempt.cards)
    return found


def order_of(result: SimulationResult) -> list[str]:
    """The jobs in the order in which they ended."""
    rows = [(row.outcome.ranks[0].ended_at, row.job.job_id) for row in result.rows if row.outcome]
    return [job_id for _, job_id in sorted(rows)]


def test_replicates_of_a_cell_are_on_different_cards() -> None:
    """Servers of eight cards have room enough: hardly a cell meets a card twice. It is a preference
    and no law: a card does not stand idle for it. (That no process runs two replicates is a law,
    checked in every simulated run.)"""
    all_different = cells = 0
    for seed in range(60):
        random = Random(seed)
        times, width = random.choice([2, 3]), random.choice([1, 1, 2])
        isolation = random.choice(["warm", "warm", "process"])
        models = random.randint(1, 3)
        jobs = [
            job(str(n), model=f"m{n % models}", cards=width, isolation=isolation)
            for n in range(random.randint(1, 12))
        ]
        result = simulate(
            replicated(jobs, times),
            [node(f"n{n}") for n in range(random.randint(1, 2))],
            Scattered(seed, sigma=0.5),
            settings=SimulationSettings(seed=seed, noise=0.1),
            schedule_settings=ScheduleSettings(seed=seed),
        )
        for held in cards_of(result).values():
            cards = [card for group in held for card in group]
            assert len(cards) == times * width
            all_different += len(set(cards)) == len(cards)
            cells += 1
    assert all_different >= 0.9 * cells, (all_different, cells)


def test_a_resumed_run_knows_the_cards_of_its_replicates() -> None:
    first, second = replicated([job("a")], 2)
    places = {
        first.job.cell_id: {("hpu-1", 0), ("hpu-1", 1), ("hpu-1", 3), ("hpu-2", 2)},
        "another cell": {("hpu-1", 2)},
    }
    measured = replace(first, action=Action.REUSE, reason="measured")
    cluster = busy_cluster(
        measured, second, on=[node("hpu-1", node_id="started-again", cards=4)], cards_before=places
    )
    assert [card.index for card in cluster.only().cards] == [2]


@thorough
@given(
    cells=st.integers(1, 10),
    models=st.integers(1, 4),
    times=st.integers(2, 4),
    cards=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_a_model_is_loaded_once_for_each_process_that_holds_it(
    cells: int, models: int, times: int, cards: int, seed: int
) -> None:
    jobs = [job(str(n), model=f"m{n % models}") for n in range(cells)]
    result = play(replicated(jobs, times), [node(cards=cards)], seed)
    if cards == 1:
        loads = min(models, cells) * times
        least = times * (8 + cells * 100) + 10 * loads
        assert least <= result.makespan_s <= least + 2 * times
        assert result.workers == times
    else:
        assert result.workers <= max(cards, times) * times


def test_the_seed_draws_the_order_and_repeats_it() -> None:
    jobs = numbered(12)
    nights = {seed: order_of(play(replicated(jobs, 2), [node(cards=1)], seed)) for seed in range(4)}
    assert len({tuple(night) for night in nights.values()}) == 4
    assert nights[3] == order_of(play(replicated(jobs, 2), [node(cards=1)], 3))
    done = set(nights[3][:5])
    rest = [
        replace(each, action=Action.REUSE) if each.job.job_id in done else each
        for each in replicated(jobs, 2)
    ]
    # Twelve cells of one replicate come first, whichever it is.
    assert order_of(play(rest, [node(cards=1)], 3))[:7] == nights[3][5:12]


def test_a_batch_that_does_not_fit_is_not_tried_again_by_other_replicates() -> None:
    jobs = replicated([job(batch_size=size) for size in (8, 16)], 3)
    settings = replace(QUIET, faults=Faults(fits_up_to=8))
    result = simulate(jobs, [node(cards=1)], Fixed(run_s=100, load_s=10), settings=settings)
    states = [row.state for row in result.rows if row.job.batch_size == 16]
    assert sorted(states) == [State.OUT_OF_MEMORY, State.PRUNED, State.PRUNED]


def test_before_a_deadline_first_replicates_are_the_anchors() -> None:
    jobs = replicated(
        [job(batch_size=size, model=model) for model in "ab" for size in (1, 2, 4)], 3
    )
    chosen = anchors(jobs)
    assert {p.job.replicate for p in jobs if p.job.job_id in chosen} == {1}
    assert len(chosen) == 2
