"""The timed loop: warm-up, then repeats of the same work until the answer is known well enough.

A *repeat* is one pass over the same batches, so repeats can be compared. What varies between them
is the machine, and a confidence interval of their throughput says how much. The loop stops when
that interval is tight, after ``max_repeats``, or when the time is up, and says which. A pass that
the time limit cuts keeps its samples, marked incomplete; at least one batch is always measured.

All ranks of a gang start a repeat together and decide from the same gathered figures whether to
go on, so none of them waits for one that has stopped. Clocks and ``synchronize`` are injected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workloads.api import Collective, MeasureSettings, Phase, Sample, StopReason
from workloads.confidence import mean_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One batch as the workload saw it; the loop adds the times around it."""

    items: int
    input_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    ttft_s: float | None = None
    step_s: tuple[float, ...] = ()
    loss: float | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    communication_s: float | None = None


#: (repeat, batch) -> a function that says what the batch did.
RunBatch = Callable[[int, int], Callable[[], Observation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The clocks and hooks of one job."""

    clock: Callable[[], float]  # monotonic seconds
    cpu_clock: Callable[[], float]  # CPU seconds of this process
    synchronize: Callable[[], None]  # waits until the device has done what was queued
    collective: Collective
    enter_phase: Callable[[Phase], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Record of a timed loop."""

    samples: tuple[Sample, ...]
    stop_reason: StopReason
    warmup_s: float

    @property
    def representative_repeat(self) -> int:
        """The last complete timed repeat; the cut one where none was completed."""
        timed = [sample for sample in self.samples if not sample.warmup]
        complete = [sample.repeat for sample in timed if sample.complete]
        return max(complete or [sample.repeat for sample in timed])


@dataclass(frozen=True, slots=True)
class _Pass:
    """One rank's part of one repeat, as the ranks tell each other."""

    output_tokens: int
    items: int
    wall_s: float
    finished: bool  # no batch was left out
    time_is_up: bool


def measure(
    run_batch: RunBatch,
    batches: int,
    settings: MeasureSettings,
    instruments: Instruments,
) -> Measured:
    """Time ``run_batch(repeat, batch)`` for every batch, repeat after repeat.

    Args:
        run_batch: does the work of one batch of one repeat (counted from 0, warm-up included)
            and returns a function that says what was done, called when the clock has stopped.
        batches: how many batches this rank has in a repeat, at least 1.
        settings: when to stop. ``warmup`` passes come first and take ``time_limit_s`` at most.
        instruments: clocks and hooks.
    """
    if batches < 1:
        raise ValueError("nothing to measure: a repeat needs at least one batch")
    loop = _Loop(run_batch, batches, instruments)
    instruments.enter_phase("warmup")
    began = instruments.clock()
    for repeat in range(settings.warmup):
        loop.run_pass(repeat, deadline=began + settings.time_limit_s, warmup=True)
    warmup_s = instruments.clock() - began if settings.warmup else 0.0

    instruments.enter_phase("measure")
    deadline = instruments.clock() + settings.time_limit_s
    rates: list[float] = []
    repeat = settings.warmup
    while True:
        passes = loop.run_pass(repeat, deadline=deadline, warmup=False)
        if all(done.finished for done in passes):
            rates.append(throughput(passes))
        stop_reason = _why_stop(rates, passes, settings)
        if stop_reason is not None:
            instruments.enter_phase("finish")  # what follows is no part of what was timed
            return Measured(samples=tuple(loop.samples), stop_reason=stop_reason, warmup_s=warmup_s)
        repeat += 1


def throughput(passes: Sequence[_Pass]) -> float:
    """Tokens (items where none are generated) a second of one repeat, all ranks together."""
    wall_s = max(done.wall_s for done in passes)
    tokens = sum(done.output_tokens for done in passes)
    work = tokens or sum(done.items for done in passes)
    return work / wall_s if wall_s > 0 else math.inf


def _why_stop(
    rates: Sequence[float], passes: Sequence[_Pass], settings: MeasureSettings
) -> StopReason | None:
    """None to go on. The same on every rank, since it looks only at what all of them know."""
    if len(rates) >= settings.min_repeats and all(map(math.isfinite, rates)):
        interval = mean_interval(rates, settings.confidence)  # None for a single repeat
        width = interval.relative_half_width if interval else None
        if width is not None and width <= settings.relative_half_width:
            return "confidence"
    if len(rates) >= settings.max_repeats:
        return "max_repeats"
    if any(done.time_is_up or not done.finished for done in passes):
        return "time_limit"
    return None


class _Loop:
    """Runs passes and collects their samples."""

    def __init__(
        self,
        run_batch: RunBatch,
        batches: int,
        instruments: Instruments,
    ) -> None:
        self._run_batch = run_batch
        self._batches = batches
        self._instruments = instruments
        self.samples: list[Sample] = []

    def run_pass(self, repeat: int, *, deadline: float, warmup: bool) -> list[_Pass]:
        """One repeat of this rank; what every rank did in it, in rank order."""
        clock = self._instruments.clock
        self._instruments.collective.barrier()
        # Only a first timed batch may start late: without it there would be nothing to report.
        forced = not warmup and not any(not sample.warmup for sample in self.samples)
        taken: list[Sample] = []
        for batch in range(self._batches):
            if clock() >= deadline and not (forced and batch == 0):
                break
            taken.append(self._time(repeat, batch, warmup))
        passes = self._instruments.collective.gather(
            _Pass(
                output_tokens=sum(sample.output_tokens for sample in taken),
                items=sum(sample.items for sample in taken),
                wall_s=math.fsum(sample.wall_s for sample in taken),
                finished=len(taken) == self._batches,
                time_is_up=clock() >= deadline,
            )
        )
        complete = all(done.finished for done in passes)
        self.samples += [dataclasses.replace(sample, complete=complete) for sample in taken]
        return passes

    def _time(self, repeat: int, batch: int, warmup: bool) -> Sample:
        instruments = self._instruments
        instruments.synchronize()
        cpu_began, began = instruments.cpu_clock(), instruments.clock()
        observe = self._run_batch(repeat, batch)
        instruments.synchronize()
        ended, cpu_ended = instruments.clock(), instruments.cpu_clock()
        seen = observe()
        return Sample(
            repeat=repeat,
            batch=batch,
            warmup=warmup,
            complete=True,
            wall_s=ended - began,
            cpu_s=cpu_ended - cpu_began,
            **{field.name: getattr(seen, field.name) for field in dataclasses.fields(seen)},
        )
