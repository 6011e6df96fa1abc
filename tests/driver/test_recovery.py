"""Remains of a run's earlier drivers that still count."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_cases import a_worker
from grid_cases import grid
from measurements import journal_row, row
from odd_files import unreadable
from schedule_cases import job, node
from store_processes import Killed

from orchestrator.analysis.measurement import measurement_of
from orchestrator.analysis.selection import newest_final
from orchestrator.core.errors import StoreError, StoreFull
from orchestrator.core.events import RecordRow
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.outcome import Attempt, Failure, FailureClass, RankOutcome
from orchestrator.core.plan import TOOK, Action, Plan, PlannedJob
from orchestrator.core.topology import parse_emulation
from orchestrator.driver.options import RunOptions
from orchestrator.driver.plan import history_of, plan_grid
from orchestrator.driver.recovery import (
    cards_before,
    clear_up,
    final_states,
    owner_of,
    recover_outcomes,
    recovered_records,
)
from orchestrator.driver.rows import row_maker, with_room
from orchestrator.on_ray.outcomes import KeptOutcome
from orchestrator.planning.planner import make_plan
from orchestrator.store.store import Store
from orchestrator.worker.protocol import Ended, Run
from orchestrator.worker.worker import request_of
from workloads.base import Result
from workloads.models.loading import open_model
from workloads.models.products import ORIGIN, origin_by, write_origin

NODE = node("n1", cards=2)


def attempt(name: str = "job", cards: int = 1, **changes: Any) -> Attempt:
    known = {"attempt_id": f"{name}-1", "job_id": name, "number": 1, "job": job(name)}
    return Attempt(**known | {"cards": NODE.cards[:cards]} | changes)


def plans_of(place: Path, *experiments: dict[str, str]) -> Callable[..., PlannedJob]:
    """The plan of a grid's first job, given the rows of a directory."""
    file = place / "g.yaml"
    file.write_text(json.dumps({"name": "night", "experiments": experiments}))

    def planned(results: Path = place / "results") -> PlannedJob:
        options = RunOptions(results=results, results_named=True, emulate="1x1:HPU")
        return plan_grid(file, options)[0].jobs[0]

    return planned


def test_the_cards_of_measured_replicates_are_known(tmp_path: Path) -> None:
    """A set of cards on two servers does not say which card was where."""
    cell = {"name": "twice", "replicates": 3, "axes": {"batch_size": [1, 2]}}
    once = {"name": "once", "batch_size": 4}
    defaults = {"workload": "text-generation", "model": "tiny-chatglm3", "accelerator": "HPU"}
    text = json.dumps({"name": "night", "defaults": defaults, "experiments": [cell, once]})
    plan = make_plan(grid(text), parse_emulation("1x8:HPU", []), [])
    store = Store(tmp_path, "night")
    assert cards_before(plan, store) == {}
    (one, two, *_), single = [p.job for p in plan.jobs if p.job.batch_size < 3], plan.jobs[-1].job
    others = [p.job for p in plan.jobs if p.job.cell_id == one.cell_id][1:]
    ended = [
        (one, {"card_indices": (5,)}),
        (others[0], {"card_indices": (6, 7)}),
        (others[1], {"card_indices": (4,), "state": State.LOST, "final": False}),
        (two, {"card_indices": (0, 1), "nodes": ("hpu-1", "hpu-2")}),
        (single, {"card_indices": (3,)}),
    ]
    with store:
        for number, (job, changes) in enumerate(ended):
            attempt = {"job_id": job.job_id, "attempt_id": f"{job.job_id}-1", "run": "night"}
            store.append(replace(row(number), **attempt, **changes))
    assert one.cell_id != two.cell_id
    assert cards_before(plan, store) == {one.cell_id: {("hpu-1", n) for n in (5, 6, 7)}}


def test_the_newest_row_counts_although_the_clock_was_set_back(tmp_path: Path) -> None:
    """The report, the next plan and the exit code agree."""
    one = {"name": "one", "workload": "text-generation", "model": "tiny-chatglm3"}
    night = grid(json.dumps({"name": "night", "experiments": [one | {"accelerator": "HPU"}]}))
    plan = make_plan(night, parse_emulation("1x1:HPU", []), [])
    job, times = plan.jobs[0].job, iter((9000.0, 1800.0, 1700.0))
    tried = replace(attempt(job.job_id, job=job), cards=plan.nodes[0].cards)
    with Store(tmp_path, "night") as store:
        for invocation, states in ("a", [State.FAILED]), ("b", [State.FAILED, State.SUCCEEDED]):
            history = store.history()
            made = row_maker(store, invocation, history, lambda: plan.nodes, lambda: next(times))
            for state in states:
                record = RecordRow(job=job, state=state, reason="", final=True, attempt=tried)
                store.append(made(record))
    (newest,) = newest_final(store.measurements())
    (planned,) = make_plan(night, plan.nodes, store.history()).jobs
    assert (newest.state, planned.action) == (State.SUCCEEDED, Action.REUSE)
    assert final_states(plan, store.history()) == {job.job_id: State.SUCCEEDED}


def test_what_a_dead_driver_had_running_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path, "night")
    with store:
        store.begin(journal_row(1))
    said: list[str] = []
    with store, owner_of(store).marks_this_process():
        clear_up(store, said.append)
    assert said == [
        f"attempt {row(1).attempt_id} was running then: LOST, its job is tried again",
    ]


def test_no_run_is_planned_by_some_of_its_rows(tmp_path: Path) -> None:
    store = Store(tmp_path, "night")
    assert history_of(store) == []
    with store:
        store.append(row(1))
    (store.tables_path / "a.parquet").mkdir()
    assert len(history_of(store)) == 1
    with (
        unreadable(lambda path: path.name.startswith("rows-")),
        pytest.raises(StoreError, match=r"what was measured cannot be known now: .*Too many open"),
    ):
        history_of(store)


def test_what_was_measured_on_another_model_of_the_name_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTGRID_MODELS", str(tmp_path))
    tuned = shutil.copytree(open_model("tiny-chatglm3").path, tmp_path / "tuned")
    job = {"name": "x", "workload": "text-generation", "model": "tuned", "accelerator": "HPU"}
    planned = plans_of(tmp_path, job)
    job_id = planned().job.job_id
    one = attempt("x", job=planned().job)

    def save(number: int, **changes: object) -> None:
        write_origin(tuned, origin_by(request_of(replace(one, number=number))) | changes)
        os.utime(tuned / ORIGIN, (9e9 / number, 9e9 / number))

    with Store(tmp_path / "results", "night") as store, owner_of(store).marks_this_process():
        save(1)
        request = request_of(one)
        assert request.took == f"model {store.run_id}-x-1" in request.residency_key
        store.append(replace(row(), job_id=job_id, details={TOOK: request.took}))
        assert planned().action is Action.REUSE
        save(2)
        assert (
            planned().action is Action.RUN
            and request_of(one).residency_key != request.residency_key
        )
        save(2, attempt=None)
        assert planned().action is Action.REUSE
        store.append(replace(row(1), job_id=job_id))  # of an earlier version
        assert planned().action is Action.REUSE
        save(1)
        assert planned().action is Action.RUN


def test_a_measured_training_is_run_again_only_where_another_took_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTGRID_ADAPTERS", str(tmp_path / "adapters"))
    common = {"model": "tiny-chatglm3", "accelerator": "HPU"}
    tuning = {"workload": "finetuning", "save_adapter": "advert", "batch_size": "max"}
    user = common | {"name": "b", "workload": "text-generation", "adapter": "advert"}
    planned = plans_of(tmp_path, common | tuning | {"name": "a"}, user)
    job = planned().job
    tried = attempt(job.job_id, job=replace(job, batch_size=4))  # as a search has found it
    adapter = tmp_path / "adapters" / "advert"
    adapter.mkdir(parents=True)

    store = Store(tmp_path / "results", "night")
    with store, owner_of(store).marks_this_process():
        write_origin(adapter, origin_by(request_of(tried)))
        store.append(replace(row(), job_id=job.job_id))
    assert planned().action is Action.REUSE
    shutil.copytree(tmp_path / "results", tmp_path / "copy")
    with Store(tmp_path / "copy", "night") as other:
        assert other.run_id != store.run_id
        assert planned(tmp_path / "copy").action is Action.REUSE
        with owner_of(other).marks_this_process():
            write_origin(adapter, origin_by(request_of(tried)))
    assert (planned().action, planned(tmp_path / "copy").action) == (Action.RUN, Action.REUSE)
    write_origin(adapter, {"model": "tiny-chatglm3"})
    assert planned().action is Action.REUSE


# ---------------------------------------------------------------- outcomes that nodes kept


def kept(of: Attempt, rank: int = 0, failure: Failure | None = None) -> KeptOutcome:
    outcome = RankOutcome(
        rank=rank,
        state=State.FAILED if failure else State.SUCCEEDED,
        started_at=1.0,
        ended_at=2.0,
        failure=failure,
        worker=a_worker(worker_id="w"),
    )
    return Run("w", of, rank), Ended("w", of.attempt_id, outcome, False)


def test_a_gang_needs_all_of_its_ranks() -> None:
    gang = attempt(cards=2)
    assert list(recovered_records([kept(gang)], {"job-1"}, {})) == []
    (record,) = recovered_records([kept(gang), kept(gang, rank=1)], {"job-1"}, {})
    assert record.state is State.SUCCEEDED


@pytest.mark.parametrize("purpose", ["probe", "measure"])
def test_a_failure_and_a_probe_are_not_final(purpose: str) -> None:
    failure = Failure(FailureClass.CRASH, "SIGSEGV")
    failed = kept(attempt(purpose=purpose), failure=failure)
    (record,) = recovered_records([failed], {"job-1"}, {})
    assert (record.state, record.reason, record.final) == (State.FAILED, "SIGSEGV", False)
    (record,) = recovered_records([kept(attempt(purpose="probe"))], {"job-1"}, {})
    assert not record.final


def test_a_recovered_row_of_a_search_has_the_batch_size_that_was_asked_for() -> None:
    wish = job(batch_size="max")
    tried = attempt(wish.job_id, job=replace(wish, batch_size=16))
    jobs = {wish.job_id: replace(wish, measure=replace(wish.measure, min_repeats=20))}
    (record,) = recovered_records([kept(tried)], {tried.attempt_id}, jobs)
    row = measurement_of(record, run="night", invocation_id="next", recorded_at=1e9)
    assert (row.batch_size_requested, row.batch_size, row.reason) == ("max", 16, "measured")
    assert row.measure == tried.job.measure, "it was measured before the grid was edited"
    (record,) = recovered_records([kept(tried)], {tried.attempt_id}, {})
    assert record.job.batch_size == 16  # the job is gone from the grid


PLAN = Plan(grid_name="night", jobs=(), nodes=(NODE,))
RECOVERED = "recovered 1 row from outcomes that nodes kept for a driver that died"


def begun(results: Path, *names: str) -> None:
    """A driver begins an attempt at each of these jobs, and dies."""
    with contextlib.suppress(Killed), Store(results, "night") as store:
        store.begin(*(journal_row(job_id=name, attempt_id=f"{name}-1") for name in names))
        raise Killed


def recovered(
    results: Path,
    outcomes: Iterable[KeptOutcome],
    said: list[str],
    no_room: int = 0,
    give_up: Callable[[], bool] = lambda: False,
) -> list[tuple[str, State, bool]]:
    """The rows after the next driver has recovered these outcomes; so many appends find no room."""
    session: Any = SimpleNamespace(nodes=(NODE,), kept_outcomes=lambda _: outcomes)
    with Store(results, "night") as store, owner_of(store).marks_this_process():
        append, left = store.append, iter(range(no_room))

        def appended(*rows: Measurement) -> Path:
            if next(left, None) is not None:
                raise StoreFull("cannot write x: No space left on device")
            return append(*rows)

        store.append = appended  # type: ignore[method-assign]
        write = partial(with_room, say=said.append, give_up=give_up, sleep=lambda _: None)
        recover_outcomes(session, store, PLAN, said.append, write)
    rows = store.measurements()
    return sorted((row.attempt_id, row.state, row.final) for row in rows)


def test_kept_outcomes_become_rows_once_there_is_room(tmp_path: Path) -> None:
    begun(tmp_path, "job")
    said: list[str] = []
    rows = recovered(tmp_path, [kept(attempt())], said, no_room=3)
    assert rows == [("job-1", State.LOST, False), ("job-2", State.SUCCEEDED, True)]
    paused = "PAUSED: cannot write x: No space left on device. Nothing is started until there is"
    assert said == [f"{paused} room", "there is room again, going on", RECOVERED]
    assert recovered(tmp_path, [kept(attempt())], said) == rows and len(said) == 3


def death() -> Iterator[KeptOutcome]:
    yield kept(attempt())
    raise Killed


@pytest.mark.parametrize(
    ("outcomes", "end"), [([kept(attempt())], StoreFull), (death(), Killed)], ids=["full", "killed"]
)
def test_a_driver_that_ends_before_it_has_recovered_all_leaves_it_to_the_next(
    tmp_path: Path, outcomes: Iterable[KeptOutcome], end: type[BaseException]
) -> None:
    begun(tmp_path, "job")
    with pytest.raises(end):
        recovered(tmp_path, outcomes, [], no_room=1, give_up=lambda: True)
    said: list[str] = []
    rows = recovered(tmp_path, [kept(attempt())], said)
    assert rows == [("job-1", State.LOST, False), ("job-2", State.SUCCEEDED, True)]
    assert said == [RECOVERED]


def test_an_outcome_that_cannot_become_a_row_costs_no_other(tmp_path: Path) -> None:
    begun(tmp_path, "bad", "job")
    request, ended = kept(attempt("bad"))
    result = Result(samples=(), stop_reason="", parameter_count=6.2e9)  # type: ignore[arg-type]
    outcome = replace(ended.outcome, result=result)  # type: ignore[type-var]
    said: list[str] = []
    rows = recovered(tmp_path, [(request, replace(ended, outcome=outcome)), kept(attempt())], said)
    assert rows == [
        ("bad-1", State.LOST, False),
        ("job-1", State.LOST, False),
        ("job-2", State.SUCCEEDED, True),
    ]
    assert "job" in said[0] and "'parameter_count' cannot hold its value" in said[0]
    assert said[1:] == [RECOVERED]
