"""The parts of a training step's time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measurement_factory import Night, a_job

from orchestrator.analysis.metrics import step_times_of
from orchestrator.analysis.summary import summarize
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.sections import sections
from workloads.base import Sample


def step(number: int, *, warmup: bool = False, **parts: float | None) -> Sample:
    return Sample(
        repeat=number,
        batch=0,
        warmup=warmup,
        complete=True,
        wall_s=2.0,
        cpu_s=2.0,
        items=4,
        input_tokens=40,
        output_tokens=0,
        computed_tokens=48,
        **parts,
    )


def trained(*samples: Sample, cards: int = 1) -> Measurement:
    row = Night().add(a_job(workload="finetuning", cards=cards))
    return replace(row, cards=cards, samples=tuple((0, sample) for sample in samples))


PARTS = {"data_s": 0.1, "forward_s": 0.5, "backward_s": 1.0, "optimizer_s": 0.2}


def test_shares_are_of_the_timed_steps_alone() -> None:
    row = trained(
        step(0, warmup=True, data_s=2.0, forward_s=0.0, backward_s=0.0, optimizer_s=0.0),
        step(1, **PARTS),
        step(2, **{**PARTS, "forward_s": 0.7}),
    )
    (found,) = step_times_of([row])
    assert found.step_s == 2.0
    assert (found.data, found.forward) == (pytest.approx(0.05), pytest.approx(0.3))
    assert (found.backward, found.optimizer) == (pytest.approx(0.5), pytest.approx(0.1))
    assert found.communication is None


def test_waiting_for_cards_is_told_beside_the_parts() -> None:
    (found,) = step_times_of([trained(step(0, **PARTS, communication_s=0.4), cards=2)])
    assert found.communication == pytest.approx(0.2)
    half_known = trained(step(0, **PARTS, communication_s=0.4), step(1, **PARTS), cards=2)
    assert step_times_of([half_known])[0].communication is None


def test_rows_that_did_not_train_or_failed_have_none() -> None:
    generated = trained(step(0))
    failed = replace(trained(step(0, **PARTS)), state=State.FAILED)
    assert step_times_of([generated, failed]) == ()


def test_the_terminal_names_every_part() -> None:
    row = trained(step(0, **PARTS, communication_s=0.4), cards=2)
    found = {one.title: one for one in sections(summarize([row]))}
    training = found["Training"]
    table = training.table
    assert table.head[-6:] == ("step", "data", "forward", "backward", "optimizer", "waiting")
    assert table.rows[0][-6:] == ("2.00 s", "5.0%", "25%", "50%", "10%", "20%")
    assert "part of" in training.note
