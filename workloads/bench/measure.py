"""The timed loop: warm-up, then repeats of the same batches until throughput is known well enough.

It stops at a tight confidence interval of throughput, ``max_repeats`` or the time limit. A pass cut
by the limit keeps its samples, marked incomplete; at least one batch is measured. Repeats with a
slow start count as warm-up and timing restarts; so it does, once, if the timed part compiled.
Ranks decide from the same gathered figures, so none waits for one that has stopped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.base import (
    JobContext,
    MeasureSettings,
    Request,
    Result,
    Sample,
    StopReason,
    reporting_phases_to,
)
from workloads.bench.warmup import Step, Warmth, WarmupPlan, drift, rehearse
from workloads.devices.base import Compilations
from workloads.devices.monitor.host import HostMemoryPeak, resident_bytes
from workloads.util.statistics import mean_interval


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
    encoder_s: float | None = None
    text_encoding_s: float | None = None
    denoising_s: float | None = None
    decoding_s: float | None = None
    conversion_s: float | None = None
    #: Length of the part that was counted, of a load's window; None: the whole batch.
    window_s: float | None = None


#: (repeat, batch) -> a function that returns what the batch did.
RunBatch = Callable[[int, int], Callable[[], Observation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Record of a timed loop."""

    samples: tuple[Sample, ...]
    stop_reason: StopReason
    warmth: Warmth
    compilations: Compilations = field(default_factory=Compilations)  # of the timed part

    @property
    def warmup(self) -> dict[str, Any]:
        """Cost and outcome of warm-up, as fields of ``api.Result``."""
        return dataclasses.asdict(self.warmth)

    @property
    def details(self) -> dict[str, str]:
        """Compilations of the timed part, as details of the row."""
        counters = self.compilations.as_text()
        return {"compiled_in_timed_part": counters} if counters else {}

    @property
    def representative_repeat(self) -> int:
        """The last complete timed repeat; the cut one where none was completed."""
        timed = [sample for sample in self.samples if not sample.warmup]
        complete = [sample.repeat for sample in timed if sample.complete]
        return max(complete or [sample.repeat for sample in timed])


@dataclass(frozen=True, slots=True)
class _Pass:
    """One rank's part of one repeat, as the ranks exchange it."""

    output_tokens: int
    computed_tokens: int
    items: int
    wall_s: float
    finished: bool  # no batch was left out
    time_is_up: bool
    may_restart: bool  # there is time for more warm-up
    tight: bool  # what else must be known is known


def measure(
    run_batch: RunBatch,
    batches: int,
    settings: MeasureSettings,
    context: JobContext,
    plan: WarmupPlan | None = None,
    *,
    counted: bool = True,
    together: bool = False,
    tight: Callable[[], bool] = lambda: True,
) -> Measured:
    """Time ``run_batch(repeat, batch)`` for each of a rank's ``batches``, repeat after repeat.

    Repeats count from 0, warm-up included; the function that ``run_batch`` returns is called when
    the clock has stopped. ``counted``: the engine compiles in this process, where it can be
    counted. ``together``: ranks compute batches together, so they check the time limit together
    before each; else each rank decides alone after a repeat's first batch. ``tight`` tells if other
    figures are known as well as throughput must be.
    """
    if batches < 1:
        raise ValueError("nothing to measure: a repeat needs at least one batch")
    plan = plan or WarmupPlan()
    context.enter_phase("warmup")
    began = context.clock()
    warmup_until = began + (settings.warmup_limit_s if settings.warmup else 0.0)
    loop = _Loop(
        run_batch=run_batch,
        batches=batches,
        context=context,
        warmup_until=warmup_until,
        repeat=plan.first,
        together=together,
        tight=tight,
    )
    warmth = _warm_up(loop, settings, plan)
    compilations_of = context.device.compilations if counted else Compilations
    parts, repeated = 0, False
    while True:
        parts += 1
        timed_from, before = context.clock(), compilations_of()
        stop_reason = _time(loop, settings, plan)
        if stop_reason is not None:
            compilations = compilations_of().since(before)
            compiled = any(context.collective.gather(compilations.graphs or 0))
            if not compiled or repeated or not settings.warmup or not plan.restarts:
                break
            repeated = True
        loop.samples = [dataclasses.replace(sample, warmup=True) for sample in loop.samples]
    context.enter_phase("finish")
    untimed = sum(sample.warmup for sample in loop.samples)
    return Measured(
        samples=tuple(loop.samples),
        stop_reason=stop_reason,
        compilations=compilations,
        warmth=dataclasses.replace(
            warmth,
            warmup_s=timed_from - began if untimed or warmth.warmup_steps else 0.0,
            warmup_steps=(warmth.warmup_steps or 0) + untimed,
            timed_parts=parts,
            timed_compilations=compilations.graphs,
            timed_cpu_fallbacks=compilations.cpu_fallbacks,
        ),
    )


def _warm_up(loop: _Loop, settings: MeasureSettings, plan: WarmupPlan) -> Warmth:
    """Run every shape; ``warmup_steps`` counts rehearsals only, samples count the rest."""
    shapes = {*plan.shapes}
    if not settings.warmup:
        return Warmth(shapes=len(shapes) or None)
    cut, steps, met = False, 0, frozenset[Hashable]()
    if plan.rehearse is not None:
        context = loop.context
        steps, met, cut = rehearse(plan, context.clock, loop.warmup_until, context.collective)
    firsts: frozenset[int] = frozenset()  # the first batch of each shape
    if plan.compiled and plan.rehearse is None:
        numbered = reversed([*enumerate(plan.shapes)])
        firsts = frozenset({shape: number for number, shape in numbered}.values())
    while not cut and loop.repeat - plan.first < max(settings.warmup, plan.passes):
        passes = loop.run_pass(deadline=loop.warmup_until, warmup=True, always=firsts)
        cut = not all(done.finished for done in passes)
    while cut and firsts and loop.repeat - plan.first < plan.passes:
        loop.run_pass(deadline=loop.warmup_until, warmup=True, always=firsts)
    if plan.rehearse is None and plan.shapes:
        met = frozenset(plan.shapes[sample.batch] for sample in loop.samples)
    return Warmth(
        warmup_steps=steps,
        warmup_end="limit" if cut else "complete",
        shapes=len(shapes) or None,
        shapes_unmet=len(shapes - met) if shapes else None,
    )


def _time(loop: _Loop, settings: MeasureSettings, plan: WarmupPlan) -> StopReason | None:
    """Time repeats until there is a reason to stop; None if they turn out to be warm-up."""
    loop.context.enter_phase("measure")
    deadline = loop.context.clock() + settings.time_limit_s
    rates: list[float] = []  # tokens a second of all ranks; items where none are generated
    steps: list[Step] = []
    timed_s = 0.0  # by the slowest rank of each repeat
    while True:
        passes = loop.run_pass(deadline=deadline, warmup=False)
        wall_s = max(done.wall_s for done in passes)
        if all(done.finished for done in passes):
            computed = sum(done.computed_tokens for done in passes)
            items = sum(done.items for done in passes)
            work = sum(done.output_tokens for done in passes) or items
            rates.append(work / wall_s if wall_s > 0 else math.inf)
            steps.append(Step((computed, items), wall_s, computed or items))
            slow = plan.restarts and (drift(steps) or 0.0) > 0.0
            if slow and all(done.may_restart for done in passes):
                return None
        timed_s += wall_s
        if stop_reason := _why_stop(rates, passes, settings, timed_s):
            return stop_reason


def _why_stop(
    rates: Sequence[float], passes: Sequence[_Pass], settings: MeasureSettings, timed_s: float
) -> StopReason | None:
    """Reason to stop, equal on all ranks; None to go on."""
    cut = any(done.time_is_up or not done.finished for done in passes)
    if timed_s < settings.least_s and not cut:
        return None
    known = all(map(math.isfinite, rates)) and all(done.tight for done in passes)
    if len(rates) >= settings.min_repeats and known:
        interval = mean_interval(rates, settings.confidence)  # None for a single repeat
        width = interval.relative_half_width if interval else None
        if width is not None and width <= settings.relative_half_width:
            return "confidence"
    if len(rates) >= settings.max_repeats:
        return "max_repeats"
    return "time_limit" if cut else None


@dataclass(slots=True, kw_only=True)
class _Loop:
    """One rank's passes over its batches."""

    run_batch: RunBatch
    batches: int
    context: JobContext
    warmup_until: float
    repeat: int  # the next one's number
    together: bool
    tight: Callable[[], bool]
    samples: list[Sample] = field(default_factory=list)

    def run_pass(
        self, *, deadline: float, warmup: bool, always: frozenset[int] = frozenset()
    ) -> list[_Pass]:
        """Run one repeat of this rank, batches in ``always`` despite the deadline; the passes of
        all ranks, in rank order."""
        repeat, self.repeat = self.repeat, self.repeat + 1
        clock = self.context.clock
        ranks = self.context.collective.gather((clock() >= deadline, self.batches))
        late = any(is_late for is_late, _ in ranks)
        rounds = max(count for _, count in ranks) if self.together else self.batches
        # The first timed batch runs even when late, so that there is something to report.
        forced = not warmup and not any(not sample.warmup for sample in self.samples)
        taken: list[Sample] = []
        for batch in range(rounds):
            if batch:
                late = clock() >= deadline
                if self.together:
                    late = any(self.context.collective.gather(late))
            if late and not (forced and batch == 0) and batch not in always:
                if not always:
                    break
                continue
            if batch < self.batches:
                taken.append(self._time(repeat, batch, warmup))
        passes = self.context.collective.gather(
            _Pass(
                output_tokens=sum(sample.output_tokens for sample in taken),
                computed_tokens=sum(sample.computed_tokens for sample in taken),
                items=sum(sample.items for sample in taken),
                wall_s=math.fsum(sample.wall_s for sample in taken),
                finished=len(taken) == self.batches,
                time_is_up=clock() >= deadline,
                may_restart=clock() < self.warmup_until,
                tight=self.tight(),
            )
        )
        complete = all(done.finished for done in passes)
        self.samples += [dataclasses.replace(sample, complete=complete) for sample in taken]
        return passes

    def _time(self, repeat: int, batch: int, warmup: bool) -> Sample:
        context, synchronize = self.context, self.context.device.synchronize
        synchronize()
        cpu_began, began = context.cpu_clock(), context.clock()
        observe = self.run_batch(repeat, batch)
        synchronize()
        ended, cpu_ended = context.clock(), context.cpu_clock()
        seen = observe()
        values = {field.name: getattr(seen, field.name) for field in dataclasses.fields(seen)}
        window_s = values.pop("window_s")
        return Sample(
            repeat=repeat,
            batch=batch,
            warmup=warmup,
            complete=True,
            wall_s=ended - began if window_s is None else window_s,
            cpu_s=cpu_ended - cpu_began,
            **values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A loaded engine, encoder or pipeline, which stays loaded between jobs."""

    engine: Any
    baseline_host_memory_bytes: int  # in use before it was loaded
    known: dict[str, Any] = field(default_factory=dict)  # figures taken once while it is loaded


def load_resident(
    request: Request, context: JobContext, load: Callable[..., Any]
) -> tuple[Resident, float]:
    """Return the resident ``load(request, device)`` and its seconds, 0 if already loaded."""
    load_s: list[float] = []

    def loader() -> Resident:
        context.device.release_memory()
        baseline, began = resident_bytes(), context.clock()
        with reporting_phases_to(context.enter_phase):
            engine = load(request, context.device)
        context.device.synchronize()
        load_s.append(context.clock() - began)
        return Resident(engine=engine, baseline_host_memory_bytes=baseline)

    return context.resident(request.residency_key, loader), sum(load_s)


def measure_resident(
    resident: Resident,
    context: JobContext,
    run_batch: RunBatch,
    batches: int,
    settings: MeasureSettings,
    plan: WarmupPlan,
    **options: Any,
) -> tuple[Measured, Result]:
    """Time a loaded engine (with ``weights``, ``random_weights`` and ``details``) by ``measure``;
    also the row's common fields. ``options`` are ``counted`` and ``together`` of ``measure``."""
    engine = resident.engine
    with HostMemoryPeak() as host_memory:
        measured = measure(run_batch, batches, settings, context, plan, **options)
    return measured, Result(
        samples=measured.samples,
        stop_reason=measured.stop_reason,
        **measured.warmup,
        weight_bytes=engine.weights.weight_bytes,
        parameter_count=engine.weights.parameter_count,
        baseline_host_memory_bytes=resident.baseline_host_memory_bytes,
        peak_host_memory_bytes=host_memory.bytes,
        peak_device_memory_bytes=context.device.peak_memory_bytes(),
        random_weights=engine.random_weights,
        precision_detail=engine.weights.detail,
        metrics=dict(getattr(engine, "figures", {})),
        details={**engine.details, **measured.details, "host_memory_peak": host_memory.method},
    )
