"""Figures that metrics derive from raw samples: in rows, and of rows that lack them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from measurements import row, sample

from orchestrator.analysis.metrics import figure_of, figures_of
from orchestrator.analysis.samples import derived_figures
from workloads import registry
from workloads.base import Metric, Timed
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters


def slowest(timed: Timed) -> float:
    return max(each.wall_s for each in timed.samples)


def metric(figure: object, name: str = "slowest_s") -> Metric:
    return Metric(
        name=name,
        title="slowest",
        description="Slowest.",
        figure=figure,
        better="lower",  # type: ignore[arg-type]
    )


def test_only_complete_timed_repeats_count() -> None:
    samples = [
        (0, sample(repeat=0, warmup=True, wall_s=9.0)),
        (0, sample(repeat=1, wall_s=2.0)),
        (1, sample(repeat=1, wall_s=3.0)),
        (0, sample(repeat=2, wall_s=7.0)),
        (1, sample(repeat=2, wall_s=7.0, complete=False)),
    ]
    assert derived_figures({"slowest_s": metric(slowest)}, samples) == {"slowest_s": 3.0}
    assert derived_figures({"slowest_s": metric(slowest)}, samples[:1]) == {}


def fails(timed: Timed) -> float:
    raise ZeroDivisionError


def test_a_function_that_fails_costs_its_figure_and_no_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = {
        "fails": metric(fails, "fails"),
        "none": metric(lambda timed: None, "none"),
        "nan": metric(lambda timed: math.nan, "nan"),
        "slowest_s": metric(slowest),
    }
    for _ in range(2):
        assert derived_figures(metrics, [(0, sample(wall_s=2.0))]) == {"slowest_s": 2.0}
    (told,) = caplog.messages
    assert "metric fails is left out" in told and "ZeroDivisionError" in told


def test_a_row_from_before_the_metric_has_its_figure_all_the_same() -> None:
    old = replace(row(1), workload="text-generation", workload_metrics={})
    declared = {"slowest_s": metric(slowest)}
    assert figure_of(old, "slowest_s", declared) == max(s.wall_s for _, s in old.samples)
    stored = replace(old, workload_metrics={"slowest_s": 42.0})
    assert figure_of(stored, "slowest_s", declared) == 42.0
    assert figure_of(replace(old, samples=()), "slowest_s", declared) is None
    assert "padding_share" in {each.name for each, _ in figures_of(old)}


def test_metrics_of_other_packages_join_those_of_a_task(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [
        replace(metric(slowest, "tuned_only"), of=("finetuning",)),
        replace(metric(slowest, "of_models"), of=("causal-lm",)),
        metric(slowest, "everywhere"),
        metric(slowest, "loss"),
    ]
    monkeypatch.setattr(registry, "METRICS", {each.name: each for each in others})
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
    found = registry.metrics_of(spec.name)
    assert {"loss", "of_models", "everywhere"} <= found.keys() and "tuned_only" not in found
    assert found["loss"] is own
    assert "left out: a second metric loss of causal-lm and text-generation" in caplog.text
    clash = replace(spec, metrics=(own, replace(own, unit="nats")))
    monkeypatch.setattr(registry, "WORKLOADS", {spec.name: clash})
    with pytest.raises(TypeError, match="two metrics are called loss"):
        registry.metrics_of(spec.name)
