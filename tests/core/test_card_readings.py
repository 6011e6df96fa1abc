"""Readings of a card over a timed part, from those of a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.readings import card_readings
from workloads.devices.monitor.host import CardTelemetry
from workloads.devices.monitor.nvidia import throttle_names

RECORDED = Path(__file__).parents[2] / "results" / "h100" / "nvml_readings.json"


def recorded() -> list[tuple[float, CardTelemetry]]:
    """An H100 that multiplied matrices: idle at first, then held back by its power cap."""
    return [
        (
            row["at"],
            CardTelemetry(
                temperature_c=row["temperature_c"],
                utilization_percent=row["utilization"]["gpu"],
                sm_clock_mhz=row["sm_mhz"],
                throttled=throttle_names(row["throttle_reasons"]),
                memory_used_bytes=row["memory"]["used"],
            ),
        )
        for row in json.loads(RECORDED.read_text())["busy_series"]
    ]


def test_a_card_at_its_power_cap_says_so() -> None:
    """The H100 ran at 1,400 of 1,980 MHz, and nobody could have told from its utilization."""
    readings = recorded()[1:]
    found = card_readings(readings, readings[0][0], readings[-1][0])
    assert found["throttled"] == "power cap 100%"
    assert float(found["utilization_percent_mean"]) > 99
    assert 1300 < float(found["sm_clock_mhz_mean"]) < 1500
    assert found["card_readings"] == "10"
    assert not any(name.endswith("_p95") for name in found), "ten readings have no tails"


def test_only_readings_within_the_timed_part_count() -> None:
    readings = recorded()
    last = readings[-1][0]
    assert card_readings(readings, last, last)["card_readings"] == "1"
    assert card_readings(readings, last + 1, last + 2) == {}
    assert card_readings([(0.0, CardTelemetry())], 0.0, 1.0) == {}


@given(
    st.lists(st.floats(0, 100), min_size=20, max_size=60),
    st.lists(st.sampled_from([frozenset(), frozenset({"power cap"})]), min_size=60, max_size=60),
)
def test_tails_enclose_the_mean_of_what_was_read(
    values: list[float], reasons: list[frozenset[str]]
) -> None:
    readings = [
        (float(at), CardTelemetry(utilization_percent=value, throttled=reasons[at]))
        for at, value in enumerate(values)
    ]
    found = card_readings(readings, 0.0, len(values))
    low, mean, high = (float(found[f"utilization_percent_{n}"]) for n in ("p5", "mean", "p95"))
    slack = max(values) / 1000
    assert min(values) - slack <= low <= high <= max(values) + slack
    assert min(values) - slack <= mean <= max(values) + slack
    share = sum(bool(each) for each in reasons[: len(values)]) / len(values)
    assert found["throttled"] == (f"power cap {share:.0%}" if share else "never")


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(0, set()), (1, set()), (4, {"power cap"}), (0x44, {"power cap", "temperature (hardware)"})],
)
def test_an_idle_card_is_not_throttled(bits: int, expected: set[str]) -> None:
    """NVML counts idleness among its reasons for a low clock."""
    assert throttle_names(bits) == expected
