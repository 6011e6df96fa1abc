"""Figures that workloads report: derived from samples, leaders, beside speed, parts of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from measurement_factory import Night, a_job, printed
from measurements import row

from orchestrator.analysis.metrics import (
    equal,
    figures_of,
    quality_note,
    reported_figure,
    step_times_of,
)
from orchestrator.analysis.rankings import Leader
from orchestrator.analysis.samples import derived_figures
from orchestrator.analysis.summary import at_equal_quality, summarize
from orchestrator.cli.main import main
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.export import document
from orchestrator.report.html import render
from orchestrator.report.sections import sections
from orchestrator.report.text import to_markdown
from orchestrator.report.wording import cell
from orchestrator.store.store import Store
from workloads import registry
from workloads.base import Metric, Sample, Timed
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters


def slowest(timed: Timed) -> float:
    return max(one.wall_s for one in timed.samples)


def fails(timed: Timed) -> float:
    raise ZeroDivisionError


def metric(figure: object = slowest, name: str = "slowest_s") -> Metric:
    about = {"title": "slowest", "description": "Slowest.", "better": "lower"}
    return Metric(name=name, figure=figure, **about)


def test_only_complete_timed_repeats_count() -> None:
    samples = [
        (0, sample(repeat=0, warmup=True, wall_s=9.0)),
        (0, sample(repeat=1, wall_s=2.0)),
        (1, sample(repeat=1, wall_s=3.0)),
        (0, sample(repeat=2, wall_s=7.0)),
        (1, sample(repeat=2, wall_s=7.0, complete=False)),
    ]
    assert derived_figures({"slowest_s": metric()}, samples) == {"slowest_s": 3.0}
    assert derived_figures({"slowest_s": metric()}, samples[:1]) == {}


def test_a_function_that_fails_costs_its_figure_and_no_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    functions = {"fails": fails, "none": lambda _: None, "nan": lambda _: math.nan, "s": slowest}
    metrics = {name: metric(function, name) for name, function in functions.items()}
    for _ in range(2):
        assert derived_figures(metrics, [(0, sample(wall_s=2.0))]) == {"s": 2.0}
    (warning,) = caplog.messages
    assert "metric fails is left out" in warning and "ZeroDivisionError" in warning


def test_a_row_from_before_the_metric_has_its_figure_all_the_same() -> None:
    old = replace(row(1), workload="text-generation", workload_metrics={})
    declared = {"slowest_s": metric()}
    assert reported_figure(old, "slowest_s", declared) == max(s.wall_s for _, s in old.samples)
    stored = replace(old, workload_metrics={"slowest_s": 42.0})
    assert reported_figure(stored, "slowest_s", declared) == 42.0
    assert reported_figure(replace(old, samples=()), "slowest_s", declared) is None
    assert "padding_share" in {metric.name for metric, _ in figures_of(old)}


def test_metrics_of_other_packages_join_those_of_a_task(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [
        replace(metric(name="tuned_only"), of=("finetuning",)),
        replace(metric(name="of_models"), of=("causal-lm",)),
        metric(name="everywhere"),
        metric(name="loss"),
    ]
    monkeypatch.setattr(registry, "METRICS", {one.name: one for one in others})
    own = metric(None, "loss")
    spec = WorkloadSpec(
        name="text-generation",
        function="",
        parameters=WorkloadParameters,
        summary="",
        tasks=("causal-lm",),
        metrics=(own,),
    )
    monkeypatch.setattr(registry, "WORKLOADS", {spec.name: spec})
    metrics = registry.metrics_of(spec.name)
    assert {"loss", "of_models", "everywhere"} <= metrics.keys() and "tuned_only" not in metrics
    assert metrics["loss"] is own
    assert "left out: a second metric loss of causal-lm and text-generation" in caplog.text
    clash = replace(spec, metrics=(own, replace(own, unit="nats")))
    monkeypatch.setattr(registry, "WORKLOADS", {spec.name: clash})
    with pytest.raises(TypeError, match="two metrics are called loss"):
        registry.metrics_of(spec.name)


# ---------------------------------------------------------------- leaders


def verified(name: str, values: list[float]) -> list[Measurement]:
    """One row a precision, the fastest first, each with a value of one figure."""
    night = Night()
    job = {"workload": "verification", "parameters": ()}
    return [
        night.add(a_job(**job, precision=precision), workload_metrics={name: value})
        for precision, value in zip(("fp32", "bf16", "fp16", "int8"), values, strict=False)
    ]


def leaders(rows: list[Measurement]) -> tuple[Leader, ...]:
    (ranking,) = summarize(rows).rankings
    return ranking.leaders


@given(values=st.lists(st.floats(0, 1e6), min_size=2, max_size=4), higher=st.booleans())
def test_the_leader_is_the_best_in_the_declared_direction(
    values: list[float], higher: bool
) -> None:
    name = "compared_tokens" if higher else "largest_logit_difference"
    named = leaders(verified(name, values))
    best = max(values) if higher else min(values)
    alike = sum(isclose(best, value, rel_tol=0.01) for value in values)
    if alike == len(values):
        assert not named
        return
    (leader,) = named
    assert leader.metric.name == name and leader.tied == alike - 1
    assert leader.value == best == leader.row.workload_metrics[name]


def test_a_figure_without_a_better_way_names_nobody() -> None:
    assert not leaders(verified("logit_spread", [1.0, 2.0]))
    assert not leaders(verified("of_nobody", [1.0, 2.0]))
    assert not leaders(verified("mean_logit_difference", [1.0, math.nan]))
    (leader,) = leaders(verified("mean_logit_difference", [math.nan, 2.0, 1.0]))
    assert leader.value == 1.0


def test_every_form_of_the_report_names_the_leader() -> None:
    rows = verified("largest_logit_difference", [0.5, 0.75, 0.125])
    summary = summarize(rows)
    (ranking,) = summary.rankings
    (leader,) = ranking.leaders
    assert leader.row is not ranking.fastest
    words = f"best largest logit difference {summary.chosen(leader.row)}: 0.1250"
    for text in (printed(summary, 200), to_markdown(summary), render(summary, rows)):
        assert words in text.replace("difference: ", "difference ")
    (best,) = document(summary)["best"]
    (one,) = best["best_by_figure"]
    assert (one["job_id"], one["better"]) == (leader.row.job_id, "lower")


# ---------------------------------------------------------------- quality beside speed

AGREEMENT = {"fp32": 1.0, "bf16": 0.97, "int4": 0.6}


def compared() -> list[Measurement]:
    """Three precisions at two batch sizes; what int4 writes is another text, and one row of bf16
    was not compared."""
    night = Night(emulated=False)
    for precision, agreement in AGREEMENT.items():
        for size in (8, 16):
            known = precision != "bf16" or size == 8
            figures = {"quality_top1_agreement": agreement} if known else {}
            night.add(a_job(precision=precision, batch_size=size), workload_metrics=figures)
    return night.rows


def test_a_cell_has_its_quality_beside_its_speed() -> None:
    (table,) = summarize(compared()).tables
    notes = {size: cell(table, "bf16", size).notes[0] for size in ("8", "16")}
    assert notes["8"].endswith("0.9700 same tokens") and "same" not in notes["16"]
    assert quality_note(compared()[4]) == "0.6000 same tokens"
    losses = {"held_out_loss": 2.25, "first_batch_loss_after": 1.0}
    tuned = Night(emulated=False).add(a_job(workload="finetuning"), workload_metrics=losses)
    assert quality_note(tuned) == "2.250 held-out loss"
    assert not equal(tuned) and not equal(tuned, 5.0)


def test_speed_is_what_is_judged_unless_asked() -> None:
    summary = summarize(compared())

    def on_front(summary: object) -> set[tuple[str, int]]:
        (front,) = summary.fronts
        return {(row.precision, row.batch_size) for row in (*front.best, *front.beaten)}

    assert {precision for precision, _ in on_front(summary)} == set(AGREEMENT)
    assert on_front(at_equal_quality(summary)) == {("fp32", 8), ("fp32", 16), ("bf16", 8)}
    assert on_front(at_equal_quality(summary, 0.99)) == {("fp32", 8), ("fp32", 16)}
    assert [equal(row) for row in compared()] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("option", "left"), [([], {"int4"}), (["--equal-quality"], {"fp32", "bf16"})]
)
def test_the_command_draws_fronts_at_equal_quality(
    tmp_path: Path, option: list[str], left: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(tmp_path, "compared") as store:
        store.append(*compared())
    line = ["report", "compared", "--results", str(tmp_path), "--format", "html", "--output", "-"]
    assert main([*line, *option]) == 0
    page = capsys.readouterr().out
    fronts = page[page.index('<section id="fronts">') :].partition("</section>")[0]
    assert {precision for precision in AGREEMENT if precision in fronts} == left
    assert "0.6000 same tokens" in page  # its tables stay whole


# ---------------------------------------------------------------- the parts of a training step

PARTS = {"data_s": 0.1, "forward_s": 0.5, "backward_s": 1.0, "optimizer_s": 0.2}
LONGER = {**PARTS, "forward_s": 0.7}


def step(number: int, **parts: float | None) -> Sample:
    return sample(repeat=number, wall_s=2.0, output_tokens=0, **parts)


def trained(*samples: Sample) -> Measurement:
    tuned = Night().add(a_job(workload="finetuning", cards=2))
    return replace(tuned, samples=tuple((0, one) for one in samples))


def test_shares_are_of_the_timed_steps_alone() -> None:
    warm = {"data_s": 2.0, "forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0}
    warm_up = replace(step(0, **warm), warmup=True)
    (time,) = step_times_of([trained(warm_up, step(1, **PARTS), step(2, **LONGER))])
    assert time.step_s == 2.0 and time.communication is None
    shares = (time.data, time.forward, time.backward, time.optimizer)
    assert shares == pytest.approx((0.05, 0.3, 0.5, 0.1))
    failed = replace(trained(step(0, **PARTS)), state=State.FAILED)
    assert step_times_of([trained(step(0)), failed]) == ()


def test_waiting_for_cards_is_told_beside_the_parts() -> None:
    waiting = step(0, **PARTS, communication_s=0.4)
    (time,) = step_times_of([trained(waiting)])
    assert time.communication == pytest.approx(0.2)
    assert step_times_of([trained(waiting, step(1, **PARTS))])[0].communication is None
    (training,) = [one for one in sections(summarize([trained(waiting)])) if one.id == "training"]
    assert training.table.head[-6:] == (
        *("step", "data", "forward", "backward", "optimizer", "waiting"),
    )
    assert training.table.rows[0][-6:] == ("2.00 s", "5.0%", "25%", "50%", "10%", "20%")
    assert "part of" in training.note
