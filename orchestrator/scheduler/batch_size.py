"""Searches for a batch size: the largest that fits (``max``), and the fastest (``best``). Pure.

*Largest.* Memory is about linear in the batch size. Two sizes that fitted, or one and the slope of
other jobs of the same work, give a line; the search jumps to where it meets the card's memory.
Without memory readings it doubles until a size does not fit, then bisects.

*Fastest.* Throughput has one peak, searched among powers of two by golden section. Two sizes are
tied if their intervals overlap and their means are within the tolerance: neither side is given up
then, and the smallest tied size is the answer. Trials are timed less tightly than a measurement.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, log

from orchestrator.core.job import Job
from orchestrator.core.measurement import complete_of, repeats_of, totals_of
from orchestrator.core.outcome import Outcome, Purpose
from orchestrator.core.settings import Goal, Search
from workloads import registry
from workloads.base import MeasureSettings
from workloads.util.statistics import Interval, mean_interval

#: Usable share of a card's memory: allocators lose some between blocks.
USABLE = 0.97
_ANY_MEASURE = MeasureSettings()


def configuration_of(job: Job) -> Job:
    """The job less batch size, replicate and neutral settings: equal if memory needs are."""
    return replace(job, batch_size=1, experiment="", measure=_ANY_MEASURE, replicate=1)


@dataclass(slots=True)
class MemoryBook:
    """Peaks of memory that a run has seen, by configuration and batch size."""

    _peaks: dict[Hashable, dict[int, int]] = field(default_factory=dict)
    _slopes: dict[Hashable, float] = field(default_factory=dict)  # of the newest line of the work
    _limits: dict[Hashable, int] = field(default_factory=dict)  # by kind of card

    def learn(self, job: Job, outcome: Outcome) -> None:
        """Record the memory that an attempt used, if its worker reports it."""
        known = list(filter(None, (memory_of(rank.result) for rank in outcome.ranks)))
        if not known or not isinstance(job.batch_size, int):
            return
        self._limits[job.accelerator] = min(limit for _, limit in known)
        peaks = self._peaks.setdefault((configuration_of(job), job.replicate), {})
        peaks[job.batch_size] = max(peak for peak, _ in known)
        if (slope := _slope(peaks)) is not None:
            self._slopes[_work(job)] = slope

    def largest(self, job: Job) -> int | None:
        """The batch size at which the line of such jobs meets the usable memory; None if too little
        is known, or memory does not grow."""
        peaks = self._peaks.get((configuration_of(job), job.replicate), {})
        limit = self._limits.get(job.accelerator)
        if not peaks or limit is None:
            return None
        slope = _slope(peaks) or self._slopes.get(_work(job))
        if not slope:
            return None
        largest = max(peaks)
        fixed = peaks[largest] - slope * largest
        return max(int((USABLE * limit - fixed) / slope), 0)


def memory_of(result: object) -> tuple[int, int] | None:
    """Reported peak and limit of a card's memory in bytes, or None; those of an emulated card
    exclude imports."""
    details: Mapping[str, str] = getattr(result, "details", {})
    limit = details.get("card_memory_bytes", "")
    peak = getattr(result, "peak_device_memory_bytes", None)
    if peak is None:
        above = getattr(result, "peak_host_memory_bytes", None)
        baseline = getattr(result, "baseline_host_memory_bytes", None)
        peak = None if above is None or baseline is None else above - baseline
    if not limit.isdecimal() or peak is None or peak <= 0:
        return None
    return int(peak), int(limit)


def _slope(peaks: Mapping[int, int]) -> float | None:
    """Bytes per item, from the largest size and the next of at most half; None if not above 0."""
    large = max(peaks)
    small = max((size for size in peaks if 2 * size <= large), default=None)
    if small is None:
        return None
    slope = (peaks[large] - peaks[small]) / (large - small)
    return slope if slope > 0 else None


def _work(job: Job) -> Hashable:
    return (job.workload, job.model, job.dataset, job.accelerator, job.cards, job.parameters)


def purpose_of(goal: Goal) -> Purpose:
    """Purpose of the trials of a search."""
    return "trial" if goal == "best" else "probe"


def timed_roughly(job: Job, wish: Search) -> Job:
    """The job with a trial's timing: as tight as the search's tolerance, in a third of the time."""
    measure = replace(
        job.measure,
        relative_half_width=max(job.measure.relative_half_width, wish.tolerance),
        time_limit_s=job.measure.time_limit_s / 3,
        least_s=0.0,
    )
    return replace(job, measure=measure)


def rate_of(job: Job, outcome: Outcome) -> Interval | None:
    """Throughput of an attempt with its interval, of zero width for a single repeat."""
    counts = registry.throughput_of(job.workload)
    field = counts.counts if counts is not None else "items"
    timed = [
        (rank.rank, sample)
        for rank in outcome.ranks
        for sample in (rank.result.samples if rank.result is not None else ())
        if not sample.warmup
    ]
    repeats = repeats_of(timed)
    totals = map(totals_of, (complete_of(repeats) or repeats).values())
    rates = [getattr(total, field) / total.wall_s for total in totals if total.wall_s > 0]
    if len(rates) == 1:
        return Interval(mean=rates[0], low=rates[0], high=rates[0])
    return mean_interval(rates, job.measure.confidence)


def unit_of(job: Job) -> str:
    """The unit of a job's throughput."""
    counts = registry.throughput_of(job.workload)
    return counts.unit if counts is not None else "samples/s"


#: Jumps of one search before it bisects: memory is not linear then.
MOST_JUMPS = 6
#: Factor beyond the known sizes up to which the line is trusted.
TRUSTED = 16
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Outcome of one size."""

    fits: bool
    rate: Interval | None = None  # throughput, where it was measured


History = Mapping[int, Trial]


def next_size(history: History, search: Search, fitting: int | None = None) -> int | None:
    """The size to try next; None once ``answer`` is final. Memory should hold ``fitting``."""
    if search.goal == "best":
        return next_faster(history, search)
    return next_larger(history, search, fitting)


def why(history: History, search: Search) -> str:
    """Short reason why the search stopped."""
    return (why_fastest if search.goal == "best" else why_largest)(history, search)


def largest_fit(history: History) -> int | None:
    """The largest size known to fit and below every size known not to; None if there is none."""
    return max((size for size, trial in _fitting(history).items() if trial.fits), default=None)


def next_larger(history: History, search: Search, fitting: int | None = None) -> int | None:
    """The size to probe next for the largest; None when ``largest_fit`` is the answer."""
    fit, misfit = largest_fit(history) or 0, _smallest_misfit(history)
    upper = search.cap if misfit is None else min(search.cap, misfit - 1)
    missed = floor(fit * search.tolerance)  # a larger answer that is not looked for
    if upper - fit <= (missed if misfit is not None else 0):
        return None
    proof = min(fit + missed + 1, upper)  # if this does not fit, the search is over
    if fitting is not None and fit and len(history) < MOST_JUMPS + 2:
        aim = min(fitting, TRUSTED * fit)
        return min(max(_jump(history, aim, fit, misfit, proof), proof), upper)
    if misfit is None:
        return min(max(2 * fit, 1), search.cap)
    return max((fit + misfit) // 2, proof)


def _jump(history: History, aim: int, fit: int, misfit: int | None, proof: int) -> int:
    """The size that should just fit, or near it once that was tried."""
    if misfit is None:
        if aim > fit:
            return aim
        below = max(
            (size for size, trial in history.items() if trial.fits and size < fit), default=0
        )
        return max(proof, fit + min(2 * (fit - below), fit)) if 2 * below > fit else proof
    if fit < aim < misfit:
        return aim
    if aim <= fit:
        return proof
    misfits = sum(not trial.fits for trial in history.values())
    back = misfit - max(1, misfit // 32) * 4 ** (misfits - 1)
    return back if back > fit else (fit + misfit) // 2


def why_largest(history: History, search: Search) -> str:
    """Short reason why the search for the largest stopped."""
    fit, misfit = largest_fit(history), _smallest_misfit(history)
    probes = f"{len(history)} probe{'s' if len(history) > 1 else ''}"
    if fit is None:
        return f"not even batch size {misfit} fits" if misfit is not None else "nothing was tried"
    if misfit is None:
        return (
            f"batch size {fit} is the cap of the search, and a larger one may fit ({probes}); "
            f"batch_size: {{max: {{cap: {2 * fit}}}}} tries more"
        )
    within = f", and none up to {misfit} was tried" if misfit - fit > 1 else ""
    return f"batch size {fit} fits and {misfit} does not{within} ({probes})"


def powers(cap: int) -> list[int]:
    """The sizes among which the fastest is looked for."""
    return [1 << exponent for exponent in range(cap.bit_length())]


def most_trials(cap: int) -> int:
    """Trials after which a search for the fastest stops: those of golden section, and three."""
    return ceil(log(max(len(powers(cap)), 2)) / -log(_GOLDEN)) + 3


def tied(one: Interval, other: Interval, tolerance: float) -> bool:
    """Return whether two throughputs overlap and differ by less than the tolerance."""
    overlap = one.low <= other.high and other.low <= one.high
    return overlap and abs(one.mean - other.mean) <= tolerance * max(one.mean, other.mean)


def next_faster(history: History, search: Search) -> int | None:
    """The size to measure next for the fastest; None when ``answer`` is final."""
    ceiling = _smallest_misfit(history)
    sizes = [size for size in powers(search.cap) if ceiling is None or size < ceiling]
    if not sizes or len(history) >= most_trials(search.cap):
        return None
    trials = ((at, history.get(size)) for at, size in enumerate(sizes))
    rates = {at: trial.rate for at, trial in trials if trial is not None and trial.rate is not None}
    if not rates:
        return sizes[round((1 - _GOLDEN) * (len(sizes) - 1))]
    top = max(rates, key=lambda at: rates[at].mean)
    for beyond_ties in (False, True):  # first beside the best, then beyond what is tied with it
        known = [
            at
            for at in rates
            if not (beyond_ties and tied(rates[at], rates[top], search.tolerance))
        ]
        left = max((at for at in known if at < top), default=-1)
        right = min((at for at in known if at > top), default=len(sizes))
        below = [at for at in range(left + 1, top) if at not in rates]
        above = [at for at in range(top + 1, right) if at not in rates]
        if below or above:
            # The golden section of the longer gap, seen from its end at the best.
            gap = above if len(above) >= len(below) else below[::-1]
            return sizes[gap[round((1 - _GOLDEN) * (len(gap) - 1))]]
    return None


def answer(history: History, search: Search) -> int | None:
    """The best size so far: the smallest that is tied with the highest throughput, or the largest
    that fits where none was measured; None if none fits."""
    fitting = _fitting(history).items()
    rates = {size: trial.rate for size, trial in fitting if trial.fits and trial.rate is not None}
    if not rates:
        return largest_fit(history)
    top = max(rates.values(), key=lambda rate: rate.mean)
    return min(size for size, rate in rates.items() if tied(rate, top, search.tolerance))


def why_fastest(history: History, search: Search) -> str:
    """Short reason why a size is the fastest."""
    chosen = answer(history, search)
    if chosen is None:
        return why_largest(history, search)
    text = f"batch size {chosen} is the fastest of {', '.join(map(str, sorted(history)))}"
    rate = history[chosen].rate
    ties = [
        str(size)
        for size, trial in sorted(history.items())
        if size != chosen and rate and trial.fits and trial.rate
        if trial.rate.mean >= rate.mean and tied(trial.rate, rate, search.tolerance)
    ]
    if ties:
        text += f"; tied with {', '.join(ties)}, which need more memory"
    if (misfit := _smallest_misfit(history)) is not None:
        text += f"; {misfit} does not fit"
    elif chosen * 2 > search.cap:
        text += f"; the cap of the search is {search.cap}"
    return text


def _smallest_misfit(history: History) -> int | None:
    return min((size for size, trial in history.items() if not trial.fits), default=None)


def _fitting(history: History) -> History:
    ceiling = _smallest_misfit(history)
    return {size: t for size, t in history.items() if ceiling is None or size < ceiling}
