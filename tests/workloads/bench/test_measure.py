"""The timed loop, run on a clock that only moves when work is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import patience

from workloads.base import MeasureSettings, Sample
from workloads.bench.collective import OneCard
from workloads.bench.measure import Measured, Observation, measure
from workloads.devices.base import Compilations
from workloads.util.statistics import mean_interval


class Bench:
    """Work whose durations are given, on clocks of its own."""

    def __init__(self, durations: Callable[[int, int], float], collective: Any = None) -> None:
        self.now = 1000.0
        self.cpu = 50.0
        self.durations = durations
        self.ran: list[tuple[int, int]] = []
        self.phases: list[str] = []
        self.synchronized = 0
        device = SimpleNamespace(synchronize=self.synchronize, compilations=Compilations)
        self.context: Any = SimpleNamespace(
            clock=lambda: self.now,
            cpu_clock=lambda: self.cpu,
            device=device,
            collective=collective or OneCard(),
            enter_phase=self.phases.append,
        )

    def synchronize(self) -> None:
        self.synchronized += 1

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        self.ran.append((repeat, batch))
        self.now += self.durations(repeat, batch)
        self.cpu += 2 * self.durations(repeat, batch)

        return lambda: Observation(items=2, input_tokens=10, output_tokens=6, computed_tokens=20)

    def measure(self, batches: int, settings: MeasureSettings) -> Measured:
        return measure(self.run_batch, batches, settings, self.context)


def rates(samples: list[Sample]) -> list[float]:
    """Throughput of each complete timed repeat, worked out anew from the samples."""
    numbers = sorted({s.repeat for s in samples if s.complete and not s.warmup})
    return [
        sum(s.output_tokens for s in samples if s.repeat == n)
        / sum(s.wall_s for s in samples if s.repeat == n)
        for n in numbers
    ]


def tight(values: list[float], settings: MeasureSettings) -> bool:
    if len(values) < max(2, settings.min_repeats):
        return False
    interval = mean_interval(values, settings.confidence)
    assert interval is not None and interval.relative_half_width is not None
    return interval.relative_half_width <= settings.relative_half_width


all_settings = st.builds(
    MeasureSettings,
    warmup=st.integers(0, 2),
    min_repeats=st.integers(1, 4),
    max_repeats=st.integers(4, 9),
    confidence=st.sampled_from([0.8, 0.95, 0.99]),
    relative_half_width=st.sampled_from([0.01, 0.05, 0.3]),
    time_limit_s=st.one_of(st.floats(0.0, 8.0), st.floats(0.0, 90.0)),
)
durations = st.lists(st.floats(0.01, 5.0), min_size=40, max_size=40)


@given(settings=all_settings, batches=st.integers(1, 4), times=durations)
def test_it_stops_as_soon_as_one_of_its_reasons_holds_and_never_later(settings, batches, times):
    bench = Bench(lambda repeat, batch: times[(repeat * batches + batch) % len(times)])
    done = bench.measure(batches, settings)
    timed = [s for s in done.samples if not s.warmup]
    values = rates(list(done.samples))
    assert timed, "at least one batch is always measured"
    elapsed = sum(s.wall_s for s in timed)
    if done.stop_reason == "confidence":
        assert tight(values, settings)
    elif done.stop_reason == "max_repeats":
        assert len(values) == settings.max_repeats
    else:
        assert elapsed >= settings.time_limit_s - 1e-9
    for count in range(1, len(values)):
        assert not tight(values[:count], settings)
        assert count < settings.max_repeats
    # The last batch may overrun the limit; none is begun after it.
    before_last = elapsed - timed[-1].wall_s
    assert before_last < settings.time_limit_s + 1e-9 or len(timed) == 1

    assert [(s.repeat, s.batch) for s in done.samples] == bench.ran
    last = max(s.repeat for s in done.samples)
    first = min(s.repeat for s in timed)
    assert first >= settings.warmup
    for sample in done.samples:
        whole = sum(s.repeat == sample.repeat for s in done.samples) == batches
        assert (sample.complete, sample.warmup) == (whole, sample.repeat < first)
        assert sample.warmup or sample.complete or sample.repeat == last
    complete = [s.repeat for s in timed if s.complete]
    assert done.representative_repeat == (complete[-1] if complete else last)


@given(times=durations)
def test_samples_carry_the_clocks_differences(times: list[float]) -> None:
    bench = Bench(lambda repeat, batch: times[repeat * 2 + batch])
    done = bench.measure(2, MeasureSettings(warmup=1, max_repeats=5, time_limit_s=1e9))
    for sample in done.samples:
        assert sample.wall_s == pytest.approx(times[sample.repeat * 2 + sample.batch])
        assert sample.cpu_s == pytest.approx(2 * sample.wall_s)
    assert bench.synchronized == 2 * len(done.samples)
    untimed = [sample.wall_s for sample in done.samples if sample.warmup]
    assert done.warmth.warmup_s == pytest.approx(sum(untimed))
    assert done.warmth.warmup_steps == len(untimed)
    assert bench.phases == ["warmup", *["measure"] * done.warmth.timed_parts, "finish"]


def test_no_batches_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        Bench(lambda r, b: 1.0).measure(0, MeasureSettings())


def test_counting_is_not_timed() -> None:
    bench = Bench(lambda repeat, batch: 1.0)

    def run(repeat: int, batch: int) -> Callable[[], Observation]:
        observe = bench.run_batch(repeat, batch)

        def slow() -> Observation:
            bench.now += 100.0
            return observe()

        return slow

    done = measure(run, 1, MeasureSettings(warmup=0, max_repeats=3), bench.context)
    assert [s.wall_s for s in done.samples] == [1.0, 1.0]  # and 200 s of counting end it


def test_a_warm_up_without_end_is_cut_by_its_own_limit() -> None:
    settings = MeasureSettings(warmup=5, time_limit_s=1, warmup_limit_s=60)
    done = Bench(lambda r, b: 30.0).measure(10, settings)
    assert [s.warmup for s in done.samples].count(True) == 2
    assert [s.warmup for s in done.samples].count(False) == 1
    assert (done.stop_reason, done.warmth.warmup_end) == ("time_limit", "limit")
    whole = Bench(lambda r, b: 30.0).measure(10, MeasureSettings(warmup=5, time_limit_s=1))
    assert [s.warmup for s in whole.samples].count(True) == 50
    assert whole.warmth.warmup_end == "complete"


def of_ranks(world_size: int, rank: Callable[[int, Any], Any]) -> list[Any]:
    """Return ``rank(number, collective)`` of each rank, each in a thread of its own."""
    gate = threading.Barrier(world_size, timeout=patience(20))
    values: list[Any] = [None] * world_size
    done: dict[int, Any] = {}

    def run(number: int) -> None:
        def gather(value: Any) -> list[Any]:
            values[number] = value
            gate.wait()
            everything = list(values)
            gate.wait()
            return everything

        done[number] = rank(number, SimpleNamespace(gather=gather))

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
    assert len(done) == world_size, "a rank hangs or failed"
    return [done[number] for number in range(world_size)]


@pytest.mark.parametrize(
    ("waits_s", "batch_s", "batches", "settings"),
    [
        # One rank comes two seconds after the other, which waits for it beyond the warm-up's limit.
        ((2.0, 0.0), (0.1, 0.1), (1, 1), MeasureSettings(warmup=1, warmup_limit_s=1.0)),
        # The limit lies between what the ranks' clocks say before the fourth batch.
        ((0.0, 0.0), (1.0, 1.01), (6, 6), MeasureSettings(warmup=0, time_limit_s=3.02)),
        # One pair of ranks has fewer batches than another, which it does not keep waiting.
        ((0.0, 0.0), (1.0, 1.0), (2, 3), MeasureSettings(warmup=0, max_repeats=3)),
    ],
    ids=["before the first batch", "between two batches", "unequal shares"],
)
def test_no_rank_begins_a_shared_batch_alone(waits_s, batch_s, batches, settings) -> None:
    """Ranks that compute together run the same batches, whatever each one's clock says of a limit:
    one that began alone would wait for the others until the collective gives up."""

    def rank(number: int, collective: Any) -> list[tuple[int, int]]:
        bench = Bench(lambda repeat, batch: batch_s[number], collective)
        gather, waits = collective.gather, iter((waits_s[number],))

        def waiting(value: Any) -> list[Any]:
            values: list[Any] = gather(value)
            bench.now += next(waits, 0.0)
            return values

        collective.gather = waiting
        measure(bench.run_batch, batches[number], settings, bench.context, together=True)
        return bench.ran

    ran = of_ranks(2, rank)
    shared = min(batches)
    alike = [[each for each in ran[n] if each[1] < shared] for n in range(2)]
    assert alike[0] == alike[1] != []


@given(
    settings=all_settings,
    speeds=st.lists(st.floats(0.1, 9.0), min_size=2, max_size=3),
    batches=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    times=durations,
)
def test_all_ranks_of_a_gang_stop_together(settings, speeds, batches, times) -> None:

    def rank(number: int, collective: Any) -> Measured:
        def duration(repeat: int, batch: int) -> float:
            return times[(7 * repeat + batch) % 40] * speeds[number]

        return Bench(duration, collective).measure(batches[number], settings)

    done = of_ranks(len(speeds), rank)
    assert len({m.stop_reason for m in done}) == 1
    verdicts = [{s.repeat: s.complete for s in m.samples if not s.warmup} for m in done]
    for other in verdicts[1:]:
        for repeat in verdicts[0].keys() & other.keys():
            assert verdicts[0][repeat] == other[repeat]
    complete = [{r for r, whole in verdict.items() if whole} for verdict in verdicts]
    assert all(numbers == complete[0] for numbers in complete)
    for measured in done:
        timed = [s for s in measured.samples if not s.warmup]
        last = max(s.repeat for other in done for s in other.samples)
        earlier = sum(s.wall_s for s in timed if s.repeat < last)
        first = min(s.repeat for s in timed)
        assert earlier < settings.time_limit_s + 1e-9 or last == first


@pytest.mark.parametrize(
    ("repeat_s", "limit_s", "repeats"), [(0.5, 100.0, 10), (3.0, 100.0, 3), (0.5, 2.0, 4)]
)
def test_a_timed_part_that_must_be_long_is_repeated_until_it_is(repeat_s, limit_s, repeats) -> None:
    """Beyond the most repeats, too, so that a card's energy can be read; never beyond the limit."""
    settings = MeasureSettings(warmup=0, max_repeats=5, time_limit_s=limit_s, least_s=5.0)
    done = Bench(lambda repeat, batch: repeat_s).measure(1, settings)
    assert (len(rates(list(done.samples))), done.stop_reason) == (repeats, "confidence")
