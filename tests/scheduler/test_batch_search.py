"""The searches for a batch size: the largest that fits, and the fastest."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import job

from orchestrator.core.job import State
from orchestrator.core.outcome import Outcome, RankOutcome
from orchestrator.core.settings import Search, from_mapping, search_of
from orchestrator.scheduler.batch_size import (
    MOST_JUMPS,
    MemoryBook,
    Trial,
    answer,
    largest_fit,
    most_trials,
    next_faster,
    next_larger,
    powers,
    rate_of,
    why,
)
from orchestrator.scheduler.simulated_faults import simulated_result, true_rate
from workloads.base import Result
from workloads.util.statistics import mean_interval

CARD = 10**11


def outcome(result: Result) -> Outcome:
    rank = RankOutcome(rank=0, state=State.SUCCEEDED, started_at=0.0, ended_at=1.0, result=result)
    return Outcome(attempt_id="a-1", state=State.SUCCEEDED, ranks=(rank,))


def with_peak(memory_bytes: int) -> Result:
    return Result(
        samples=(),
        stop_reason="max_repeats",
        peak_device_memory_bytes=memory_bytes,
        details={"card_memory_bytes": str(CARD)},
    )


def look_for_largest(
    limit: int, search: Search, memory: Random | None = None, fixed: float = 0.2
) -> tuple[int | None, list[int], str]:
    """The answer where sizes up to ``limit`` fit, the probes it took and why it stopped. With
    ``memory`` the card tells peaks, which lie off a line by as much as it draws."""
    history: dict[int, Trial] = {}
    book, probes, line = MemoryBook(), [], None
    while (size := next_larger(history, search, line)) is not None:
        assert size not in history, "a size is never probed twice"
        probes.append(size)
        history[size] = Trial(fits=size <= limit)
        if memory is not None and size <= limit:
            share = fixed + (memory.uniform(0.9, 1.0) - fixed) * size / (limit + 0.5)
            book.learn(job(batch_size=size), outcome(with_peak(int(share * CARD))))
        line = book.largest(job(batch_size="max"))
    return largest_fit(history), probes, why(history, search)


@pytest.mark.parametrize(
    ("limit", "cap", "probes", "says"),
    [
        (11, 1024, [1, 2, 4, 8, 16, 12, 10, 11], "size 11 fits and 12 does not (8 probes)"),
        (0, 1024, [1], "not even batch size 1 fits"),
        (10_000, 48, [1, 2, 4, 8, 16, 32, 48], "48 is the cap of the search, and a larger one may"),
        (10_000, 48, [1, 2, 4, 8, 16, 32, 48], "; batch_size: {max: {cap: 96}} tries more"),
    ],
)
def test_without_knowledge_of_memory_it_doubles_then_bisects(
    limit: int, cap: int, probes: list[int], says: str
) -> None:
    found, tried, reason = look_for_largest(limit, Search("max", cap, 0.0))
    assert (found or 0, tried) == (min(limit, cap), probes)
    assert says in reason


@given(
    limit=st.integers(0, 5000),
    cap=st.integers(1, 4096),
    tolerance=st.sampled_from([0.0, 0.02, 0.1]),
    seed=st.none() | st.integers(0, 1000),
)
def test_it_finds_the_largest_within_the_tolerance(
    limit: int, cap: int, tolerance: float, seed: int | None
) -> None:
    memory = None if seed is None else Random(seed)
    found, probes, _ = look_for_largest(limit, Search("max", cap, tolerance), memory)
    best = min(limit, cap)
    assert (found or 0) <= best <= (found or 0) * (1 + tolerance)
    assert all(1 <= size <= cap for size in probes)
    jumps = MOST_JUMPS if memory is not None else 0
    assert len(probes) <= 2 * ceil(log2(cap + 1)) + 1 + jumps


def test_where_memory_is_a_line_it_jumps_there() -> None:
    """The search of the H100 (174 of 1,024) took 16 probes and 5 out-of-memories."""
    found, probes, _ = look_for_largest(174, Search("max", 1024, 0.05), Random(1))
    assert found is not None and 174 / 1.05 <= found <= 174
    assert len(probes) <= 7 and sum(size > 174 for size in probes) <= 2


def test_another_precision_of_the_work_tells_the_slope() -> None:
    book = MemoryBook()
    for size in (1, 2, 32):
        peak = 10**9 * (20 + 2 * size)
        book.learn(job(precision="bf16", batch_size=size), outcome(with_peak(peak)))
    assert book.largest(job(precision="bf16", batch_size="max")) == 38
    assert book.largest(job(precision="fp32", batch_size="max")) is None
    book.learn(job(precision="fp32", batch_size=1), outcome(with_peak(42 * 10**9)))
    assert book.largest(job(precision="fp32", batch_size="max")) == 28


@given(limit=st.integers(1, 500), better=st.integers(1, 500))
def test_a_later_misfit_lowers_the_answer(limit: int, better: int) -> None:
    """A measurement that runs out of memory where its probe had fitted takes the answer back."""
    history = {size: Trial(fits=True) for size in range(1, limit + 1)}
    history[min(better, limit)] = Trial(fits=False)
    assert (largest_fit(history) or 0) < min(better, limit)
    size = next_larger(history, Search("max", 1024, 0.0))
    assert size is None or size < better


def look_for_fastest(
    rates: list[float], cap: int, noise: float = 0.0, fits: int | None = None, seed: int = 0
) -> tuple[int | None, int, str]:
    """The answer where the powers of two have these rates, the trials it took and the reason."""
    draw, search = Random(seed), Search("best", cap, 0.05)
    sizes = powers(cap)
    history: dict[int, Trial] = {}
    while (size := next_faster(history, search)) is not None:
        assert size in sizes and size not in history
        if fits is not None and size > fits:
            history[size] = Trial(fits=False)
            continue
        true = rates[sizes.index(size)]
        measured = [true * (1 + draw.gauss(0, noise)) for _ in range(4)]
        history[size] = Trial(fits=True, rate=mean_interval(measured))
    return answer(history, search), len(history), why(history, search)


def hill(peak: int, count: int, share: Callable[[], float]) -> list[float]:
    """Rates that fall from the peak on either side, each to a share of the one before it."""
    rates = [1000.0] * count
    for at in range(peak - 1, -1, -1):
        rates[at] = rates[at + 1] * share()
    for at in range(peak + 1, count):
        rates[at] = rates[at - 1] * share()
    return rates


@st.composite
def hills(draw: st.DrawFn) -> tuple[int, list[float]]:
    """A cap, and rates that rise strictly to one peak and fall after it."""
    count = draw(st.integers(1, 17))
    peak = draw(st.integers(0, count - 1))
    return 1 << (count - 1), hill(peak, count, lambda: draw(st.floats(0.3, 0.99)))


@given(hill=hills(), fits=st.none() | st.integers(0, 70_000))
def test_the_peak_of_a_hill_is_found_by_golden_section(
    hill: tuple[int, list[float]], fits: int | None
) -> None:
    cap, rates = hill
    found, trials, _ = look_for_fastest(rates, cap, fits=fits)
    sizes = [size for size in powers(cap) if fits is None or size <= fits]
    there = rates[: len(sizes)]
    if not there:
        assert found is None
        return
    assert found == 1 << there.index(max(there))
    assert trials <= most_trials(cap) + (0 if fits is None else 2)


def test_noise_costs_no_more_than_it_hides() -> None:
    kept = []
    for seed in range(300):
        draw = Random(seed)
        rates = hill(draw.randrange(11), 11, lambda: draw.uniform(0.5, 0.97))  # noqa: B023
        found, trials, _ = look_for_fastest(rates, 1024, noise=0.01, seed=seed)
        assert found is not None and trials <= most_trials(1024) == 8
        kept.append(rates[powers(1024).index(found)] / max(rates))
    kept.sort()
    assert kept[0] >= 0.95 and kept[3] >= 0.97


def test_of_tied_sizes_the_smaller_is_taken() -> None:
    plateau = [100.0, 190.0, 350.0, 600.0, 900.0, 1000.0, 1002.0, 1003.0, 1001.0, 1002.0, 1001.0]
    found, trials, reason = look_for_fastest(plateau, 1024, noise=0.01)
    assert found in (32, 64) and trials <= 8
    assert f"batch size {found} is the fastest of" in reason and "; tied with " in reason


def test_a_throughput_is_that_of_complete_repeats() -> None:
    asked = job(batch_size=64)
    rate = rate_of(asked, outcome(simulated_result(asked, None, 0.01, Random(0))))
    assert rate is not None and rate.low < true_rate(asked) < rate.high
    assert rate.mean == pytest.approx(true_rate(asked), rel=0.02)
    assert rate_of(asked, Outcome(attempt_id="a-1", state=State.LOST, ranks=())) is None


@given(
    goal=st.sampled_from(["max", "best"]),
    cap=st.none() | st.integers(1, 1_000_000),
    tolerance=st.none() | st.floats(0, 0.9999),
)
def test_a_mapping_and_its_text_mean_the_same(
    goal: str, cap: int | None, tolerance: float | None
) -> None:
    said = {"cap": cap, "tolerance": tolerance}
    text = from_mapping({goal: {name: value for name, value in said.items() if value is not None}})
    found = search_of(text)
    assert found is not None and found.text == text and found.goal == goal
    assert found.cap == (cap or 1024)
    if tolerance is not None:
        assert found.tolerance == pytest.approx(tolerance, abs=1e-6)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"max": None, "best": None}, "one key"),
        ({"max": 5}, "takes a mapping"),
        ({"max": {"cap": 0}}, "not 1 to 1,000,000"),
        ({"max": {"cap": 2.5}}, "not a whole number"),
        ({"best": {"tolerance": True}}, "not a number"),
        ({"best": {"tolerance": 1}}, "not 0 to below 1"),
    ],
)
def test_a_mapping_that_means_nothing_is_refused(wish: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_mapping(wish)


@pytest.mark.parametrize("text", ["big", "", "max()", "max(cap=0)", "best(cap=4,tolerance=0.1)"])
def test_text_that_is_no_search_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no batch size"):
        search_of(text)
