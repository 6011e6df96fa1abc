"""Laws of roles, over every setting of every workload: who meets whom, and under what label."""

from __future__ import annotations

from dataclasses import replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from measurement_factory import Night, a_job, with_interval
from pydantic.fields import FieldInfo

from orchestrator.analysis.effects import effects_of
from orchestrator.analysis.rankings import rankings_of
from orchestrator.analysis.selection import settings_of
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import MAX, Accelerator, Job
from orchestrator.core.measurement import Measurement
from orchestrator.core.settings import FIELDS, JobFields
from workloads.models.precision import PRECISIONS
from workloads.registry import WORKLOADS

NAMES = {
    workload: [*FIELDS, *entry.declared(entry.engines[0])] for workload, entry in WORKLOADS.items()
}


def values_of(info: FieldInfo) -> st.SearchStrategy[Any]:
    kinds = get_args(info.annotation) or (info.annotation,)
    kinds = (info.annotation,) if get_origin(info.annotation) is Literal else kinds
    known: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(1, 4),
        float: st.sampled_from([1e-4, 0.5]),
        str: st.sampled_from(["one", "another"]),
        NoneType: st.none(),
    }
    return st.one_of(
        st.sampled_from(get_args(kind)) if get_origin(kind) is Literal else known[kind]
        for kind in kinds
    )


def strategy_of(workload: str, name: str) -> st.SearchStrategy[Any]:
    """Values of a field or a parameter."""
    fields: dict[str, st.SearchStrategy[Any]] = {
        "workload": st.sampled_from(list(WORKLOADS)),
        "engine": st.sampled_from(WORKLOADS[workload].engines),
        "precision": st.sampled_from(PRECISIONS),
        "batch_size": st.sampled_from([1, 48, MAX]),
        "accelerator": st.sampled_from(list(Accelerator)),
    }
    if name in fields:
        return fields[name]
    if name in FIELDS:
        return values_of(JobFields.model_fields[name])
    models = WORKLOADS[workload].setting_models()
    return values_of(next(m.model_fields[name] for m in models if name in m.model_fields))


@st.composite
def jobs(draw: st.DrawFn, workload: str) -> Job:
    entry = WORKLOADS[workload]
    said = {n: d.default for n, d in entry.declared(entry.engines[0]).items()}
    job = a_job(workload=workload, engine=entry.engines[0], parameters=tuple(sorted(said.items())))
    others = [name for name in NAMES[workload] if name != "workload"]
    for name in draw(st.lists(st.sampled_from(others), max_size=4)):
        if name in FIELDS or name in entry.declared(job.engine):
            job = changed(job, name, draw(strategy_of(workload, name)))
    return job


def changed(job: Job, name: str, value: Any) -> Job:
    if name == "engine":
        declared = WORKLOADS[job.workload].declared(value)
        said = dict(job.parameters)
        kept = {n: said.get(n, declaration.default) for n, declaration in declared.items()}
        return replace(job, engine=value, parameters=tuple(sorted(kept.items())))
    if name in FIELDS:
        return replace(job, **{name: value})
    return replace(job, parameters=tuple(sorted({**dict(job.parameters), name: value}.items())))


def row_of(job: Job) -> Measurement:
    row = replace(Night(emulated=False).add(job, items=0), device_name="card")
    return with_interval(row, row.metrics.throughput or 0.0, row.metrics.throughput)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, Job, Job]:
    """The name of a setting, and two jobs that differ in it alone."""
    workload = draw(st.sampled_from(sorted(WORKLOADS)))
    name = draw(st.sampled_from(NAMES[workload]))
    first = draw(jobs(workload))
    declared = WORKLOADS[workload].declared(first.engine)
    assume(name in FIELDS or name in declared)
    own = declared.keys() - WORKLOADS[workload].parameters.model_fields.keys()
    if name == "engine":  # alone: the settings of either are at their defaults
        assume(all(declared[n].is_default(dict(first.parameters)[n]) for n in own))
    second = changed(first, name, draw(strategy_of(workload, name)))
    assume(first.job_id != second.job_id)
    return name, first, second


@pytest.mark.slow
@given(pair=pairs())
def test_a_role_decides_what_two_rows_are_to_each_other(pair: tuple[str, Job, Job]) -> None:
    """Rows that differ in a choice alone, or in what is neutral, meet in one ranking and are told
    apart there; rows that differ in work never meet. One choice is one effect, by its name. A
    resident model is shared unless a setting that loads differs."""
    name, first, second = pair
    rows = [row_of(first), row_of(second)]
    declared = {**FIELDS, **WORKLOADS[first.workload].declared(first.engine)}
    rankings = rankings_of(rows, settings_of(rows))
    assert len(rankings) == (2 if declared[name].role == "work" else 1)
    if declared[name].role != "work":
        summary = summarize(rows)
        assert len({summary.chosen(row) for row in rows}) == 2
    compared = declared[name].role == "choice" and name != "batch_size"
    effects = effects_of(rows, settings_of(rows))
    assert [effect.name for effect in effects] == ([name] if compared else [])
    assert (first.residency_key != second.residency_key) is declared[name].loads


@pytest.mark.slow
@given(data=st.data(), workload=st.sampled_from(sorted(WORKLOADS)))
def test_no_label_stands_for_two(data: st.DataObject, workload: str) -> None:
    drawn = data.draw(
        st.lists(jobs(workload), min_size=2, max_size=6, unique_by=lambda j: j.job_id)
    )
    summary = summarize([row_of(job) for job in drawn])
    tables = [(table.title, tuple(table.about.items())) for table in summary.tables]
    assert len(set(tables)) == len(tables)
    for ranking in summary.rankings:
        told = [summary.chosen(row) for row in (ranking.fastest, *ranking.tied)]
        assert len(set(told)) == len(told) == len(ranking.ranked)


def test_what_changes_nothing_is_told_only_where_nothing_else_tells_two_apart() -> None:
    kept = (("keep_texts", 0), ("output_tokens", 128))
    alone = [row_of(a_job(parameters=kept, precision=name)) for name in ("bf16", "fp32")]
    assert set(map(str, summarize(alone).labels.values())) == {"bf16", "fp32"}
    beside = row_of(a_job(parameters=(("keep_texts", 1), ("output_tokens", 128))))
    assert set(map(str, summarize([*alone, beside]).labels.values())) == {
        "bf16 keep texts 0",
        "bf16 keep texts 1",
        "fp32",
    }


def test_labels_name_no_batch_size_where_the_server_makes_its_own() -> None:
    served = row_of(a_job(workload="serving", batch_size=1, precision="bf16"))
    other = row_of(a_job(batch_size=1, precision="bf16"))
    assert [summarize([row]).chosen(row) for row in (served, other)] == ["bf16", "bf16 b=1"]
    assert "b=" not in a_job(workload="serving", batch_size=1).label


def test_what_nobody_declares_is_work_and_is_told() -> None:
    rows = [
        row_of(a_job(workload="elsewhere", parameters=(("speed", value),)))
        for value in (1, 2, None)
    ]
    summary = summarize(rows)
    assert len(summary.rankings) == 3
    (flag,) = [flag for flag in summary.banners if flag.name == "Unknown settings"]
    assert (flag.count, flag.details) == (3, ("elsewhere: speed",))


def test_rows_of_an_earlier_version_meet_those_of_this_one() -> None:
    now = row_of(a_job(parameters=(("batching", "continuous"), ("output_tokens", 128))))
    earlier = row_of(a_job(parameters=(("batching", "refill"),), precision="fp32"))
    summary = summarize([now, earlier])
    (ranking,), (table,) = summary.rankings, summary.tables
    assert len(ranking.ranked) == len(table.cells) == 2
    assert set(map(str, summary.labels.values())) == {"bf16", "fp32"}
