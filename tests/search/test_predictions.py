"""Predictions of cells that were not measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import exp

import numpy as np
import pytest
from search_cases import cells, throughput

from orchestrator.core.job import Job, State
from orchestrator.core.measurement import Prediction
from orchestrator.search.predictions import Known, predict

JOBS = cells("m1", "m2")
NOISE = 0.01


def known(jobs: Iterable[Job], *, seed: int = 0, earlier: bool = False) -> list[Known]:
    draw = np.random.default_rng(seed)
    return [
        Known(
            job=one,
            state=State.SUCCEEDED,
            figures={"throughput": throughput(one) * exp(NOISE * draw.normal())},
            earlier=earlier,
        )
        for one in jobs
    ]


def of_throughput(predictions: Iterable[Prediction]) -> dict[str, Prediction]:
    return {one.job_id: one for one in predictions if one.figure == "throughput"}


@pytest.mark.parametrize("seed", range(3))
def test_the_other_cells_lie_within_their_intervals(seed: int) -> None:
    some = np.random.default_rng(seed).permutation(len(JOBS))[: len(JOBS) // 3]
    predictions = of_throughput(predict(JOBS, known((JOBS[at] for at in some), seed=seed)))
    others = [one for at, one in enumerate(JOBS) if at not in some]
    assert predictions.keys() == {one.job_id for one in others}
    inside = [
        predictions[one.job_id].low <= throughput(one) <= predictions[one.job_id].high
        for one in others
    ]
    errors = [abs(predictions[one.job_id].value / throughput(one) - 1) for one in others]
    assert np.mean(inside) >= 0.9 and np.mean(errors) < 0.1
    assert all(one.basis == "16 measured, roofline prior" for one in predictions.values())


def test_nothing_is_predicted_from_nothing() -> None:
    assert predict(JOBS, []) == []
    unanswered = [Known(job=one, state=State.NOT_STARTED) for one in JOBS]
    assert predict(JOBS, unanswered) == []


def test_earlier_runs_inform_and_are_named() -> None:
    earlier = known(JOBS[:24], earlier=True)
    predictions = of_throughput(predict(JOBS, [*known(JOBS[24:28]), *earlier]))
    assert JOBS[24].job_id not in predictions
    assert predictions[JOBS[0].job_id].basis == (
        "4 measured, 24 of earlier runs with this cell, roofline prior"
    )
    assert predictions[JOBS[40].job_id].basis == "4 measured, 24 of earlier runs, roofline prior"
    alone = of_throughput(predict(JOBS, known(JOBS[24:28])))
    for one in JOBS[28:32]:
        assert predictions[one.job_id].log_deviation < alone[one.job_id].log_deviation
        assert predictions[one.job_id].value == pytest.approx(throughput(one), rel=0.1)


def test_cells_like_those_that_failed_may_not_run() -> None:
    failed = [Known(job=one, state=State.OUT_OF_MEMORY) for one in JOBS if one.batch_size == 128]
    predictions = of_throughput(predict(JOBS, [*known(JOBS[:3]), *failed[:3]]))
    large, small = JOBS[-1], JOBS[3]
    assert failed[0].job.job_id not in predictions
    assert predictions[large.job_id].runs < 0.6 < predictions[small.job_id].runs


def test_a_cell_without_true_figures_neither_informs_nor_failed() -> None:
    false = [Known(job=one, state=State.SUCCEEDED) for one in JOBS[:3]]
    predictions = of_throughput(predict(JOBS, [*false, *known(JOBS[3:8])]))
    assert JOBS[0].job_id not in predictions
    assert {(one.measured, one.runs) for one in predictions.values()} == {(5, 1.0)}


def test_workloads_do_not_inform_each_other() -> None:
    others = [replace(one, workload="training") for one in JOBS]
    predictions = predict([*JOBS, *others], known(JOBS[:8]))
    assert {one.workload for one in predictions} == {JOBS[0].workload}
