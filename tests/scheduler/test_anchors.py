"""The cells of a grid that go first: one for each configuration, the most telling one."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import job, planned

from orchestrator.core.job import MAX, Job
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.scheduler.deadline import anchors


def technique_of(this: Job) -> tuple[object, ...]:
    """The parts of a configuration, spelt out."""
    techniques = tuple(pair for pair in this.parameters if pair[0] != "output_tokens")
    fixed = (this.model, this.workload, this.dataset, this.precision, this.engine, this.isolation)
    return (*fixed, this.accelerator, this.cards, techniques)


@st.composite
def grids(draw: st.DrawFn) -> list[PlannedJob]:
    """Up to sixty jobs of up to a dozen configurations, some measured or not to be run."""
    random = Random(draw(st.integers(0, 2**32)))
    jobs = []
    for _ in range(draw(st.integers(0, 60))):
        parameters = [("attention", random.choice(["sdpa", "eager"]))]
        if random.random() < 0.5:
            parameters.append(("output_tokens", random.choice([16, 128])))
        this = job(
            model=random.choice("abc"),
            precision=random.choice(["fp32", "bf16"]),
            cards=random.choice([1, 1, 2]),
            batch_size=random.choice([1, 2, 4, 8, 16, MAX]),
            parameters=tuple(parameters),
        )
        action = random.choice([Action.RUN] * 6 + [Action.REUSE, Action.SKIP, Action.UNSUPPORTED])
        jobs.append(PlannedJob(job=this, action=action))
    unique = {each.job.job_id: each for each in jobs}
    return list(unique.values())


@given(grid=grids(), seed=st.integers(0, 2**32))
def test_every_configuration_has_one_anchor_until_a_cell_is_measured(
    grid: list[PlannedJob], seed: int
) -> None:
    chosen = anchors(grid)
    of = {each.job.job_id: each for each in grid}
    assert all(of[job_id].action is Action.RUN for job_id in chosen)
    by_configuration: dict[object, list[PlannedJob]] = {}
    for each in grid:
        by_configuration.setdefault(technique_of(each.job), []).append(each)
    for cells in by_configuration.values():
        to_run = [each for each in cells if each.action is Action.RUN]
        measured = any(each.action is Action.REUSE for each in cells)
        found = [each for each in to_run if each.job.job_id in chosen]
        assert len(found) == bool(to_run and not measured)
    shuffled = grid[:]
    Random(seed).shuffle(shuffled)
    assert anchors(shuffled) == chosen


def sizes(chosen: frozenset[str], *jobs: Job) -> list[object]:
    return sorted((j.batch_size for j in jobs if j.job_id in chosen), key=str)


def test_the_anchor_is_the_middle_batch_size_and_never_a_search() -> None:
    """Neither the slowest nor the one that may not fit."""
    jobs = [job(batch_size=size) for size in (1, 2, 4, 8, 16, 32, 64, MAX)]
    assert sizes(anchors(planned(*jobs)), *jobs) == [8]


def test_a_lone_search_is_its_own_anchor() -> None:
    assert anchors(planned(job(batch_size=MAX))) == {job(batch_size=MAX).job_id}


def test_anchors_can_be_compared_with_each_other() -> None:
    wide = [job(precision="bf16", batch_size=size) for size in (1, 2, 4, 8, 16)]
    others = [job(precision=p, batch_size=1) for p in ("fp32", "int8", "int4")]
    assert sizes(anchors(planned(*wide, *others)), *wide, *others) == [1, 1, 1, 1]


def test_lengths_refine_and_techniques_do_not() -> None:
    lengths = [job(parameters=(("output_tokens", n),)) for n in (16, 64, 256)]
    ranks = [job(model="other", parameters=(("rank", n),)) for n in (8, 64)]
    chosen = anchors(planned(*lengths, *ranks))
    assert chosen == {lengths[1].job_id, ranks[0].job_id, ranks[1].job_id}


def test_what_an_anchor_needs_goes_as_early() -> None:
    train = [job("train", batch_size=size) for size in (1, 2, 4)]
    use = job("use", batch_size=16)
    grid = [*planned(*train), PlannedJob(job=use, action=Action.RUN, needs=(train[2].job_id,))]
    assert anchors(grid) == {use.job_id, train[1].job_id, train[2].job_id}
