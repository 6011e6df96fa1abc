"""Readings over a timed part: of a real card, and of a process's share of the processors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.readings import (
    SHORTEST_OF_HOST_S,
    HostTime,
    ProcessorReading,
    ThreadTime,
    card_readings,
    use_between,
)
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


SECONDS = st.floats(0.0, 1e4)


def reading(
    at: float, threads: dict[int, tuple[float, float]] | None, host: tuple[float, float] | None
) -> ProcessorReading:
    """A reading: seconds that each thread ran and waited, and that the host was busy and stolen."""
    return ProcessorReading(
        at=at,
        ran_s=sum(ran for ran, _ in threads.values()) if threads else at / 2,
        threads=threads
        and {number: ThreadTime(ran_s=r, waited_s=w) for number, (r, w) in threads.items()},
        host=host and HostTime(busy_s=host[0], stolen_s=host[1]),
    )


def test_threads_that_compute_count_and_samplers_do_not() -> None:
    before = reading(10.0, {1: (100.0, 5.0), 2: (50.0, 1.0), 9: (1.0, 1.0)}, (1000.0, 10.0))
    after = reading(
        20.0, {1: (108.0, 6.0), 2: (54.0, 3.0), 3: (2.0, 0.5), 9: (1.1, 7.0)}, (1018.0, 12.0)
    )
    use = use_between(before, after)
    assert use is not None
    assert use.cores == pytest.approx(1.41)
    assert use.wait_share == pytest.approx((1.0 + 2.0 + 0.5) / 10)
    assert use.stolen_share == pytest.approx(2 / 20)
    assert use.host_load == pytest.approx(1.8)


def test_what_the_kernel_does_not_say_is_not_known() -> None:
    use = use_between(reading(1.0, None, None), reading(3.0, None, None))
    assert use is not None and use.cores == pytest.approx(0.5)
    assert (use.wait_share, use.stolen_share, use.host_load) == (None, None, None)
    assert use_between(reading(1.0, None, None), reading(1.0, None, None)) is None


@given(
    st.dictionaries(st.integers(0, 5), st.tuples(SECONDS, SECONDS)),
    st.dictionaries(st.integers(0, 5), st.tuples(SECONDS, SECONDS)),
    st.tuples(SECONDS, SECONDS),
    st.tuples(SECONDS, SECONDS),
    st.floats(1e-3, 1e4),
)
def test_figures_are_never_out_of_range(
    threads: dict[int, tuple[float, float]],
    later: dict[int, tuple[float, float]],
    host: tuple[float, float],
    host_later: tuple[float, float],
    wall_s: float,
) -> None:
    use = use_between(reading(0.0, threads, host), reading(wall_s, later, host_later))
    assert use is not None and use.cores >= 0
    assert (use.host_load is None) == (wall_s < SHORTEST_OF_HOST_S)
    assert use.wait_share is None or use.wait_share >= 0
    assert use.stolen_share is None or 0 <= use.stolen_share <= 1
    assert use.host_load is None or use.host_load >= 0


def test_the_host_s_load_is_of_the_time_between_its_own_counts() -> None:
    before = reading(10.0, None, (100.0, 1.0))
    after = reading(11.0, None, (102.2, 1.0))
    assert before.host is not None and after.host is not None
    earlier = dataclasses.replace(before, host=dataclasses.replace(before.host, at=9.9))
    use = use_between(earlier, after)
    assert use is not None and use.host_load == pytest.approx(2.0)
    use = use_between(before, after)
    assert use is not None and use.host_load == pytest.approx(2.2)
