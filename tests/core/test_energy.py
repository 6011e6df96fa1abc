"""Energy over a stretch of time: exact where the card counts it, unknown rather than guessed."""

from __future__ import annotations

import threading

import pytest
from core_cases import a_sample as sample
from hypothesis import given
from hypothesis import strategies as st
from measurements import attempt, job, rank, recorded
from patience import until

from orchestrator.analysis.measurement import measurement_of
from orchestrator.core.readings import Energy, Reading, energy_between
from orchestrator.worker import node_workers
from orchestrator.worker.node_workers import EMPTY_READINGS, FRESH_S, KEEP_S, CardSampler
from workloads.base import Result
from workloads.devices.monitor.host import CardTelemetry


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
