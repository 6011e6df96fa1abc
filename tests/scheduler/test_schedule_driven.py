"""The schedule under the real loop: the driver, its timers and a protocol-true executor.

The fake executor refuses whatever no schedule may ask (a card that is held, a worker that is
busy), and every row goes through the derivation that fills the result tables.
"""

from __future__ import annotations

from collections import Counter

from driver_cases import MOMENT, FakeClock, FakeExecutor, job, node, plan

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.job import MAX, Accelerator, Job, State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Attempt
from orchestrator.core.status import RunStatus
from orchestrator.core.topology import Node
from orchestrator.driver.board import Board
from orchestrator.driver.loop import Driver
from orchestrator.driver.supervisor import StopSignal
from orchestrator.scheduler.estimator import Estimator
from orchestrator.scheduler.scheduler import Schedule, ScheduleSettings


class Quiet:
    """A view that shows nothing."""

    def line(self, text: str) -> None:
        """Nothing."""

    def show(self, status: RunStatus) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Rows:
    """A store in memory."""

    def __init__(self) -> None:
        self.kept: list[Measurement] = []

    def begin(self, *rows: Measurement) -> None:
        """Nothing is lost here."""

    def to_parquet(self) -> None:
        """Rows are plain for everybody."""

    def make_reserve(self) -> None:
        """There is room."""

    def spill(self, measurement: Measurement) -> None:
        """There is room."""

    def append(self, *measurements: Measurement) -> None:
        """Keep rows."""
        self.kept.extend(measurements)


def server(name: str) -> Node:
    """A whole emulated server of eight cards."""
    return node(name, cards=8)


def drive(*jobs: Job, fits: int = 4, stop: StopSignal | None = None) -> list[Measurement]:
    """Run the jobs on two servers; batches above ``fits`` do not fit."""

    def verdict(attempt: Attempt) -> State:
        good = int(attempt.job.batch_size) <= fits
        return State.SUCCEEDED if good else State.OUT_OF_MEMORY

    clock, rows = FakeClock(), Rows()
    nodes = (server("hpu-1"), server("hpu-2"))
    the_plan = plan(*jobs, nodes=nodes)
    result = Driver(
        schedule=Schedule(the_plan.jobs, ScheduleSettings(), Estimator()),
        executor=FakeExecutor(clock, *nodes, verdict=verdict),
        store=rows,
        to_measurement=lambda row: measurement_of(
            row, run="case", invocation_id="i", recorded_at=clock(), nodes=nodes
        ),
        board=Board(run="case", plan=the_plan, started_at=MOMENT),
        view=Quiet(),
        stop=stop or StopSignal(),
        clock=clock,
        wall=clock,
        sleep=clock.sleep,
    ).drive()
    assert result.finished
    return rows.kept


def finals(rows: list[Measurement]) -> Counter[State]:
    """The final states of the jobs."""
    return Counter(row.state for row in rows if row.final)


def test_warm_jobs_gangs_and_isolated_ones_all_get_their_row() -> None:
    """Forty jobs of every sort on two servers, to the end."""
    jobs = [job(1, dataset=f"d{n}", precision=("fp32", "bf16")[n % 2]) for n in range(30)]
    jobs += [job(1, dataset=f"g{n}", cards=cards) for n, cards in enumerate((2, 4, 8, 8, 16))]
    jobs += [job(1, dataset=f"p{n}", isolation="process") for n in range(5)]
    rows = drive(*jobs)
    assert finals(rows) == {State.SUCCEEDED: 40}
    assert {row.cards: len(row.card_indices) for row in rows} == {n: n for n in (1, 2, 4, 8, 16)}


def test_a_failed_configuration_is_pruned_and_the_largest_batch_is_found() -> None:
    """With memory for four: 8 fails, 16 to 64 are pruned or fail by themselves, ``max`` is 4."""
    rows = drive(*[job(size) for size in (1, 2, 4, 8, 16, 32, 64)], job(MAX, dataset="most"))
    by_size = {row.batch_size_requested: row for row in rows if row.final}
    assert [by_size[size].state for size in "124"] == [State.SUCCEEDED] * 3
    unfit = {by_size[size].state for size in ("8", "16", "32", "64")}
    assert State.OUT_OF_MEMORY in unfit <= {State.OUT_OF_MEMORY, State.PRUNED}
    assert (by_size["max"].state, by_size["max"].batch_size) == (State.SUCCEEDED, 4)


def test_a_search_in_which_nothing_fits_leaves_a_row_without_a_batch_size() -> None:
    """The final row is the job's; its probe has one of its own."""
    rows = drive(job(MAX), fits=0)
    assert [(row.final, row.state, row.batch_size) for row in rows] == [
        (False, State.OUT_OF_MEMORY, 1),
        (True, State.OUT_OF_MEMORY, None),
    ]


def test_a_job_of_an_accelerator_that_never_joins_ends_in_virtual_time() -> None:
    """The driver's timers are what ends the wait for nodes."""
    rows = drive(job(1), job(1, accelerator=Accelerator.GPU))
    assert finals(rows) == {State.SUCCEEDED: 1, State.LOST: 1}


def test_a_request_to_stop_before_the_first_event_starts_nothing() -> None:
    """Every job is NOT_STARTED and says why."""
    stop = StopSignal()
    stop.request("SIGTERM received")
    rows = drive(*[job(1, dataset=f"d{n}") for n in range(20)], stop=stop)
    assert finals(rows).keys() <= {State.NOT_STARTED, State.SUCCEEDED}
    assert any(row.reason == "SIGTERM received" for row in rows)
