"""The Grafana dashboard asks for exactly what is exported."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from driver_cases import STATUS

from orchestrator.core.status import CardStatus, Rate
from orchestrator.on_ray.metrics import METRICS, PREFIX, rate_name, readings_of
from workloads import registry
from workloads.registry import WORKLOADS

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "nightgrid.json"


def queries() -> list[str]:
    text = DASHBOARD.read_text(encoding="utf-8")
    return [
        json.loads(one) for one in re.findall(r'"(?:expr|definition)": ("(?:\\.|[^"])*")', text)
    ]


#: The names of the throughputs of all workloads that there are, and of one that is not ours.
UNITS = {"tokens/s", "samples/s", "products/s", "µ steps/s"} | {
    throughput.unit for name in WORKLOADS if (throughput := registry.throughput_of(name))
}
RATES = {rate_name(unit) for unit in UNITS}
BY_PATTERN = re.compile(r'__name__(=~|!=)"([^"]+)"')


def drawn(query: str) -> set[str]:
    conditions = BY_PATTERN.findall(query)
    return {
        PREFIX + name
        for name in RATES
        if conditions
        and all(
            bool(re.fullmatch(pattern, PREFIX + name)) is (how == "=~")
            for how, pattern in conditions
        )
    }


def test_the_dashboard_draws_every_metric_and_no_other() -> None:
    """A metric that is renamed would leave an empty panel, and nobody would know why. Throughputs
    of whatever unit are drawn once each."""
    plain = [query for query in queries() if not BY_PATTERN.search(query)]
    asked = [name for query in plain for name in re.findall(r"\bray_\w+", query)]
    asked += [name for query in queries() for name in drawn(query)]
    assert set(asked) == {PREFIX + name for name in {*METRICS, *RATES}}
    assert all(asked.count(PREFIX + name) == 1 for name in RATES)


def test_a_throughput_is_called_by_its_unit() -> None:
    assert rate_name("tokens/s") == "nightgrid_tokens_per_s"
    assert rate_name("samples/s") == "nightgrid_samples_per_s"
    assert len(RATES) == len(UNITS)
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in RATES)


def test_the_dashboard_groups_by_tags_that_exist() -> None:
    for query in queries():
        (name, *_) = re.findall(r"ray_(nightgrid_\w+)", query)
        known = {"run", "__name__", *METRICS.get(name, ((),))[0]}
        for labels in re.findall(r"by \(([^)]*)\)", query):
            assert {label.strip() for label in labels.split(",")} <= known, query
        assert set(re.findall(r"(\w+)(?:=~|!=|=)\"", query)) <= known, query


def test_readings_have_the_tags_that_their_metric_is_declared_with() -> None:
    """Ray refuses a tag that was not declared."""
    sensors = {"power_w": 400.0, "temperature_c": 60.0, "utilization_percent": 97.0}
    card = CardStatus(card="hpu-1/HPU0", **sensors, memory_used_bytes=2**30)
    rates = tuple(Rate(unit=unit, per_s=1.0, jobs=1) for unit in UNITS)
    status = dataclasses.replace(
        STATUS, cards=(card,), rates=rates, failure_counts={"crash": 1}, jobs_run=3
    )
    readings = list(readings_of(status))
    assert {reading.name for reading in readings} == {*METRICS, *RATES}
    for reading in readings:
        assert set(reading.tags) == set(METRICS.get(reading.name, ((),))[0])


def test_what_is_not_known_is_not_recorded() -> None:
    status = dataclasses.replace(STATUS, eta_s=None)
    known = ("jobs", "attempts", "cards", "cards_busy", "cards_emulated", "paused", "status_at_s")
    assert {one.name for one in readings_of(status)} == {f"nightgrid_{name}" for name in known}
    remaining = [r.value for r in readings_of(STATUS) if r.tags.get("state") == "REMAINING"]
    assert remaining == [31.0]
