"""Energy over a stretch of time: exact where the card counts it, unknown rather than guessed."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from measurements import attempt, job, rank, recorded
from patience import until

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.readings import (
    SHORTEST_OF_HOST_S,
    Energy,
    HostTime,
    ProcessorReading,
    Reading,
    ThreadTime,
    card_readings,
    energy_between,
    use_between,
)
from orchestrator.worker import node_workers
from orchestrator.worker.node_workers import EMPTY_READINGS, FRESH_S, KEEP_S, CardSampler
from workloads.base import Result
from workloads.devices.monitor.host import CardTelemetry, throttle_names
from workloads.devices.monitor.nvidia import THROTTLED


def counted(*points: tuple[float, float]) -> list[Reading]:
    """Readings of a card that counts its energy."""
    return [(at, CardTelemetry(energy_j=joules, power_w=1.0)) for at, joules in points]


def powered(*points: tuple[float, float]) -> list[Reading]:
    """Readings of a card that tells its power alone."""
    return [(at, CardTelemetry(power_w=watts)) for at, watts in points]


def test_a_counter_is_preferred_and_read_between_its_readings() -> None:
    readings = counted(*((float(t), 1000 + 100.0 * t) for t in range(12)))
    energy = energy_between(readings, 0.5, 10.25)
    assert energy == Energy(energy_j=pytest.approx(975.0), duration_s=9.75, source="counter")
    assert energy is not None and energy.power_w == pytest.approx(100.0)


def test_power_is_integrated_by_straight_lines() -> None:
    readings = powered(*((float(t), 10.0 * t) for t in range(11)))
    energy = energy_between(readings, 0.0, 10.0)
    assert energy is not None and energy.source == "power"
    assert energy.energy_j == pytest.approx(500.0)


@given(
    start=st.floats(0, 40),
    length=st.floats(5, 50),
    watts=st.floats(1, 1000),
    step=st.floats(0.1, 1.0),
)
def test_a_constant_power_gives_power_times_time(
    start: float, length: float, watts: float, step: float
) -> None:
    times = [step * i for i in range(int(100 / step) + 1)]
    for readings in (
        powered(*((at, watts) for at in times)),
        counted(*((at, 7.0 + watts * at) for at in times)),
    ):
        energy = energy_between(readings, start, start + length)
        assert energy is not None
        assert energy.energy_j == pytest.approx(watts * length, rel=1e-6)


@pytest.mark.parametrize(
    ("readings", "start", "end", "why"),
    [
        ([], 0, 10, "never read"),
        (counted((0, 0), (1, 1), (2, 2)), 0, 10, "not read after the end"),
        (counted((5, 0), (20, 1)), 0, 10, "not read before the start"),
        (counted((0, 0), (1, 1), (2, 2), (3, 3)), 0.2, 2.9, "shorter than four readings"),
        (counted((0, 0), (1, 1), (9, 2), (12, 3)), 0, 12, "not read for most of it"),
        (counted((0, 5), (1, 6), (2, 1), (3, 2), (4, 3)), 4, 4, "no time at all"),
        ([(float(t), CardTelemetry(temperature_c=40.0)) for t in range(9)], 0, 8, "no energy"),
    ],
)
def test_what_was_not_watched_well_is_not_known(
    readings: list[Reading], start: float, end: float, why: str
) -> None:
    assert energy_between(readings, start, end) is None, why


def test_a_counter_that_goes_back_gives_way_to_power() -> None:
    """The driver was loaded anew: its counter starts over, but the power is known all along."""
    readings = counted(*((float(t), 100.0 + t if t < 5 else t) for t in range(11)))
    energy = energy_between(readings, 0, 10)
    assert energy is not None and (energy.source, energy.energy_j) == ("power", pytest.approx(10.0))


class Host:
    """A host whose card 3 counts 50 J a second, and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.silent = False

    def read(self) -> dict[int, CardTelemetry]:
        """One look at the cards."""
        return {} if self.silent else {3: CardTelemetry(energy_j=50.0 * self.now, power_w=50.0)}


def test_the_sampler_reads_once_more_for_a_stretch_that_has_just_ended() -> None:
    host = Host()
    sampler = CardSampler(host.read, clock=lambda: host.now)
    for _ in range(6):
        sampler.take()
        host.now += 1.0
    host.now = 105.75
    energy = sampler.energy(3, 100.5, 105.5)
    assert energy is not None and energy.energy_j == pytest.approx(250.0)
    assert sampler.energy(0, 100.5, 105.5) is None  # no such card


def test_old_readings_are_not_shown_as_new_and_very_old_ones_are_dropped() -> None:
    host = Host()
    sampler = CardSampler(host.read, clock=lambda: host.now)
    assert sampler.latest() == {}
    sampler.take()
    assert sampler.latest()[3].power_w == 50.0
    host.now += FRESH_S + 1
    assert sampler.latest() == {}
    host.now += KEEP_S
    sampler.take()
    assert sampler.energy(3, 100.0, host.now) is None


def test_a_host_without_tools_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_workers, "SHORTEST_S", 0.0)
    asked = []

    def read() -> dict[int, CardTelemetry]:
        asked.append(1)
        raise OSError("no such tool")

    sampler = CardSampler(read)
    sampler.start()
    assert until(lambda: not any(t.name == "card-sampler" for t in threading.enumerate()), 10)
    assert len(asked) == EMPTY_READINGS
    assert sampler.energy(0, 0.0, 1.0) is None


def row_of(*energies: Energy | None, tokens: int = 100) -> object:
    """The metrics of a gang whose ranks took these energies over one timed repeat of a second."""
    tried = attempt(job(cards=len(energies)), cards=len(energies))
    result = Result(samples=(sample(output_tokens=tokens),), stop_reason="max_repeats")
    ranks = [rank(i, result, energy=energy) for i, energy in enumerate(energies)]
    return measurement_of(
        recorded(tried, *ranks), run="r", invocation_id="i", recorded_at=1.0
    ).metrics


def test_a_gang_takes_the_energy_of_all_its_cards() -> None:
    metrics = row_of(
        Energy(energy_j=300.0, duration_s=1.0, source="counter"),
        Energy(energy_j=100.0, duration_s=1.0, source="power"),
    )
    assert (metrics.energy_j, metrics.power_w, metrics.energy_source) == (400.0, 400.0, "power")
    assert metrics.work_per_joule == pytest.approx(200.0 / 400.0)


def test_an_energy_that_is_known_of_some_cards_only_is_not_known() -> None:
    """Half of a gang's energy would make it look twice as good."""
    metrics = row_of(Energy(energy_j=300.0, duration_s=1.0, source="counter"), None)
    assert (metrics.energy_j, metrics.power_w, metrics.work_per_joule) == (None, None, None)


# ---------------------------------------------------------------- readings


RECORDED = Path(__file__).parents[2] / "results" / "h100" / "nvml_readings.json"


def readings_of() -> list[tuple[float, CardTelemetry]]:
    """An H100 that multiplied matrices: idle at first, then held back by its power cap."""
    return [
        (
            row["at"],
            CardTelemetry(
                temperature_c=row["temperature_c"],
                utilization_percent=row["utilization"]["gpu"],
                sm_clock_mhz=row["sm_mhz"],
                throttled=throttle_names(row["throttle_reasons"], THROTTLED),
                memory_used_bytes=row["memory"]["used"],
            ),
        )
        for row in json.loads(RECORDED.read_text())["busy_series"]
    ]


def test_a_card_at_its_power_cap_says_so() -> None:
    """The H100 ran at 1,400 of 1,980 MHz, and nobody could have told from its utilization."""
    readings = readings_of()[1:]
    found = card_readings(readings, readings[0][0], readings[-1][0])
    assert found["throttled"] == "power cap 100%"
    assert float(found["utilization_percent_mean"]) > 99
    assert 1300 < float(found["sm_clock_mhz_mean"]) < 1500
    assert found["card_readings"] == "10"
    assert not any(name.endswith("_p95") for name in found), "ten readings have no tails"


def test_only_readings_within_the_timed_part_count() -> None:
    readings = readings_of()
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
    assert throttle_names(bits, THROTTLED) == expected


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
