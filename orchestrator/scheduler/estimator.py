"""Estimate of a job's time on its cards, from earlier rows, with its margin of error.

The nearest rows win (``Distance``), scaled by their work (``nominal_s``) if it differs, which is
also the prior. Loading and running are estimated apart, because a warm worker does not load. Each
new row is first predicted at every distance; the errors give the margin there, which covers nine of
ten.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import ceil, exp, log
from statistics import median
from typing import Any

from orchestrator.core.job import Job, State
from orchestrator.core.plan import PastRow, Span

# Work of a job on a nominal device: a repeat calls the model so often, for so many positions; a
# call costs its launch, the reading of all parameters and its arithmetic (two operations a
# parameter and position). Within one run rows spread by 1.5 to 2.4 over it, where the work spreads
# by hundreds.

#: Parameters of a model about which nothing is known.
USUAL_PARAMETERS = 10**7
#: Positions of a prompt, and most of a training sample, whose lengths no setting says.
USUAL_POSITIONS = 64
#: Steps of training.
USUAL_STEPS = 20
#: Workloads that repeat nothing, since they measure no speed.
ONCE = frozenset(
    {"fp8-calibration", "onnx-calibration", "quality-reference", "quantization", "verification"}
)
#: Batch size of a search.
USUAL_BATCH = 8
#: Fitted to `results/past_runs` and `results/h100`: seconds before the first repeat, and repeats.
FIXED_S, WARMUP_REPEATS, USUAL_REPEATS = 1.3, 2.5, 8
#: The same for training, which makes samples, adapters and an optimizer.
TRAINING_FIXED_S = 3.5
#: The same for a load of requests, which starts its generator and waits for the last answer.
SERVING_FIXED_S = 4.5


@dataclass(frozen=True, slots=True)
class Device:
    """Nominal speed: seconds to launch a call, parameters read and operations a second."""

    call_s: float
    parameters_per_s: float
    operations_per_s: float


PROCESSOR, CARD = Device(0.015, 2e9, 4.4e10), Device(0.01, 1e12, 3e13)


def repeat_of(settings: Mapping[str, Any], batch_size: int, cards: int) -> tuple[float, float]:
    """Calls of the model in one repeat, and positions that a card computes in it."""

    def setting(name: str, usual: int) -> int:
        value = settings.get(name)
        return value if isinstance(value, int) and value > 0 else usual

    if "concurrency" in settings:  # requests of a load, as many at a time as it has users
        requests, tokens = setting("requests", 50), setting("output_tokens", 128)
        users = setting("concurrency", setting("max_sequences", USUAL_BATCH))
        length = setting("input_tokens", USUAL_POSITIONS)
        return ceil(requests / users) * tokens, requests * (tokens + length)
    if "output_tokens" in settings:
        prompts, tokens = setting("prompts", 100), setting("output_tokens", 128)
        positions = prompts * (tokens + setting("input_tokens", USUAL_POSITIONS))
        return ceil(prompts / (batch_size * cards)) * tokens, positions / cards
    if "images" in settings:
        steps, images = setting("steps", 50), setting("images", batch_size)
        pixels = setting("height", 128) * setting("width", 128)
        return ceil(images / (batch_size * cards)) * steps, images * steps * pixels / 64 / cards
    if "texts" in settings:
        texts = setting("texts", 128)
        length = min(setting("max_length", 128), USUAL_POSITIONS)
        return ceil(texts / (batch_size * cards)), texts * length / cards
    if "length" in settings:  # calibration, and the loss before and after
        samples = setting("samples", 32)
        return samples, 3 * samples * setting("length", 256)
    steps = 3 * setting("steps", USUAL_STEPS)  # backward costs two forward passes
    length = min(setting("max_length", 512), 2 * USUAL_POSITIONS)
    return steps, steps * batch_size * setting("gradient_accumulation", 1) * length


#: Prior for loading a model when nothing is known, seconds.
PRIOR_LOAD_S = 4.0
#: Prior for starting a worker process, seconds.
PRIOR_START_S = 8.0
#: ``batch_size: max`` runs a handful of short probes before it measures.
SEARCH_FACTOR = 3.0

#: The share of rows that a margin covers, and its bounds.
COVERED = 0.9
LEAST_MARGIN, LARGEST_MARGIN = 1.1, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds to load the model and to run; one job in ten exceeds ``margin`` times as long."""

    load_s: float
    run_s: float
    margin: float = 1.0

    @property
    def total_s(self) -> float:
        """Time on a worker without the model."""
        return self.load_s + self.run_s


class Distance(Enum):
    """Distance between a job and the rows of its estimate, nearest first. Until enough errors are
    known: its margin, and factors that hold nine of ten times (checked by ``python -m benchmarks
    estimates``)."""

    JOB = 1.3, (0.25, 3.5)  # the same job
    SETTINGS = 1.5, (0.25, 4.0)  # all but the batch size
    PRECISION = 1.8, (0.2, 4.0)  # workload, model, cards and precision
    MODEL = 2.0, (0.2, 5.0)  # workload, model and kind of card
    CARD = 2.0, (0.15, 6.0)  # workload and kind of card
    # No rows. The margin is not to be believed; but a first night that dares nothing learns
    # nothing. Often it is the first job of a process, with its imports.
    PRIOR = 1.5, (0.15, 15.0)


#: The same for loading: files in the host's cache load twenty times as fast.
_LOAD_SPREAD = (0.05, 4.0)
#: The narrowest that rows can make them.
_LEAST_SPREAD = (0.5, 2.0)


#: Values in ascending order.
_Sorted = list[float]


@dataclass(slots=True)
class Estimator:
    """Medians of past rows by distance; ``Estimator()`` knows only the prior.

    ``parameters_of`` says about how many parameters a model has, if that is known.
    """

    parameters_of: Callable[[str], int | None] = lambda model: None
    emulated: bool = False
    _runs: dict[Hashable, _Sorted] = field(default_factory=dict)  # by job id
    #: Runs over their nominal seconds, by model and by kind of card.
    _factors: dict[Hashable, _Sorted] = field(default_factory=dict)
    #: Runs by batch size; by precision over their nominal seconds.
    _batches: dict[Hashable, dict[int, _Sorted]] = field(default_factory=dict)
    _loads: dict[Hashable, _Sorted] = field(default_factory=dict)
    _errors: dict[Distance, _Sorted] = field(default_factory=dict)  # logarithms

    @classmethod
    def from_history(
        cls,
        rows: Iterable[PastRow],
        *,
        emulated: bool | None = None,
        queued: bool = True,
        parameters_of: Callable[[str], int | None] = lambda model: None,
    ) -> Estimator:
        """Learn from successful final rows: of emulated cards, of real ones, or (None) of both;
        ``queued`` counts waiting for a turn as part of a job's time."""
        estimator = cls(parameters_of=parameters_of, emulated=bool(emulated))
        for row in rows:
            if row.state is not State.SUCCEEDED or not row.final or row.busy_s is None:
                continue
            if emulated is None or row.emulated == emulated:
                load_s = row.load_s or 0.0  # 0 when the model was resident
                waited_s = 0.0 if queued else row.queued_s or 0.0
                run_s = max(0.0, row.busy_s - load_s - waited_s)
                estimator._learn(row.job_id, row, row.batch_size, load_s, run_s)
        return estimator

    @property
    def knows_rows(self) -> bool:
        """Return whether it has learnt from any row."""
        return bool(self._runs)

    def learn(self, job_id: str, job: Job, *, load_s: float, run_s: float) -> None:
        """Record the times of a grid's job, measured as ``job`` (with a final batch size)."""
        size = job.batch_size if isinstance(job.batch_size, int) else None
        self._learn(job_id, job, size, load_s, run_s)

    def estimate(self, job: Job) -> Estimate:
        """Seconds for ``job``, from the nearest rows there are."""
        distance, run_s = self._nearest(job)
        errors, margin = self._errors.get(distance, []), distance.value[0]
        rank = ceil(COVERED * (len(errors) + 1))
        if rank <= len(errors):
            margin = max(exp(errors[rank - 1]), LEAST_MARGIN)
        elif errors:  # too few to tell
            margin = max(margin, exp(errors[-1]))
        factor = 1.0 if isinstance(job.batch_size, int) else SEARCH_FACTOR
        return Estimate(
            load_s=self._load_s(job.job_id, job),
            run_s=factor * run_s,
            margin=min(margin, LARGEST_MARGIN),
        )

    def guess(self, job: Job) -> tuple[Span, Span]:
        """Ranges of the seconds to run ``job`` and to load its model."""
        distance, run_s = self._nearest(job)
        errors, (_, (low, high)) = self._errors.get(distance, []), distance.value
        outside = int((1 - COVERED) / 2 * (len(errors) + 1))  # rows beyond either end
        if outside:
            low, high = exp(errors[outside - 1]), exp(errors[-outside])
        elif errors:
            low, high = min(low, exp(errors[0])), max(high, exp(errors[-1]))
        run = _span(run_s, (min(low, _LEAST_SPREAD[0]), max(high, _LEAST_SPREAD[1])))
        if not isinstance(job.batch_size, int):
            run = run.times(1.0, SEARCH_FACTOR, 2 * SEARCH_FACTOR)
        return run, _span(self._load_s(job.job_id, job), _LOAD_SPREAD)

    def _nearest(self, job: Job) -> tuple[Distance, float]:
        size = job.batch_size if isinstance(job.batch_size, int) else None
        nominal_s = self._nominal_s(job, size)
        nearest = self._foretold(job.job_id, job, size, nominal_s) if self._runs else iter(())
        return next(nearest, (Distance.PRIOR, nominal_s))

    def _learn(
        self, job_id: str, known: Job | PastRow, size: int | None, load_s: float, run_s: float
    ) -> None:
        nominal_s = self._nominal_s(known, size)
        for distance, foretold in self._foretold(job_id, known, size, nominal_s):
            if run_s > 0 and foretold > 0:
                insort(self._errors.setdefault(distance, []), log(run_s / foretold))
        factor = run_s / nominal_s
        insort(self._runs.setdefault(job_id, []), run_s)
        for key in (_model(known), _card(known)):
            insort(self._factors.setdefault(key, []), factor)
        if size is not None:
            for key, value in ((_settings(known), run_s), (_precision(known), factor)):
                insort(self._batches.setdefault(key, {}).setdefault(size, []), value)
        if load_s > 0:
            for key in _loading(job_id, known):
                insort(self._loads.setdefault(key, []), load_s)

    def _foretold(
        self, job_id: str, known: Job | PastRow, size: int | None, nominal_s: float
    ) -> Iterator[tuple[Distance, float]]:
        """Yield the running time as estimated at each distance that has rows, the nearest first."""
        if (runs := self._runs.get(job_id)) is not None:
            yield Distance.JOB, _median(runs)
        if (sizes := self._batches.get(_settings(known))) is not None:
            yield Distance.SETTINGS, _at_size(sizes, size)
        if (sizes := self._batches.get(_precision(known))) is not None:
            yield Distance.PRECISION, nominal_s * _at_size(sizes, size)
        for distance, key in ((Distance.MODEL, _model(known)), (Distance.CARD, _card(known))):
            if (factors := self._factors.get(key)) is not None:
                yield distance, nominal_s * _median(factors)

    def _nominal_s(self, known: Job | PastRow, size: int | None) -> float:
        """Seconds of an attempt without loading, on a nominal device; ``size`` None: searched."""
        settings: Mapping[str, Any] = dict(known.parameters)
        measure = known.measure
        calls, positions = repeat_of(settings, size or USUAL_BATCH, known.cards)
        device = PROCESSOR if self.emulated or known.accelerator.spec.host else CARD
        count = self.parameters_of(known.model) or USUAL_PARAMETERS
        call_s = device.call_s + count / device.parameters_per_s
        repeat_s = calls * call_s + 2 * count * positions / device.operations_per_s
        # Emulated cards of a gang take turns on their host's processors, in their imports too.
        ranks = known.cards if self.emulated else 1
        # A batch that has begun is finished.
        most_s = max(measure.time_limit_s, repeat_s / max(1, calls))
        trains = "learning_rate" in settings
        if trains or known.workload in ONCE or settings.get("images") is not None:  # no repeats
            steps = settings.get("steps") or USUAL_STEPS
            passes = 1.0 + (measure.warmup / steps if trains else 0.0)
            fixed_s = TRAINING_FIXED_S if trains else FIXED_S
            return ranks * (fixed_s + min(passes * repeat_s, most_s))
        repeats = max(measure.min_repeats, min(USUAL_REPEATS, measure.max_repeats))
        # A warm-up pass is not cut before its own limit.
        warmup_s = min(WARMUP_REPEATS * repeat_s, measure.warmup_limit_s) if measure.warmup else 0.0
        fixed_s = SERVING_FIXED_S if "concurrency" in settings else FIXED_S
        timed_s = max(min(repeats * repeat_s, most_s), measure.least_s)
        return ranks * (fixed_s + warmup_s + timed_s)

    def _load_s(self, job_id: str, known: Job | PastRow) -> float:
        for key in _loading(job_id, known):
            if (loads := self._loads.get(key)) is not None:
                return _median(loads)
        return PRIOR_LOAD_S


def _settings(known: Job | PastRow) -> Hashable:
    return (*_precision(known), known.parameters)


def _precision(known: Job | PastRow) -> tuple[Hashable, ...]:
    return (known.workload, known.model, known.accelerator, known.cards, known.precision)


def _model(known: Job | PastRow) -> Hashable:
    return (known.workload, known.model, known.accelerator)


def _card(known: Job | PastRow) -> Hashable:
    return (known.workload, known.accelerator)


def _loading(job_id: str, known: Job | PastRow) -> tuple[Hashable, ...]:
    """Keys of rows whose loading takes about as long, the closest first."""
    return (job_id, (known.model, known.precision, known.accelerator), known.model)


def _at_size(sizes: dict[int, _Sorted], size: int | None) -> float:
    """The time at the nearest batch size; for a search the median of all."""
    if size is None:
        return median(map(_median, sizes.values()))
    wanted = log(size)
    return _median(sizes[min(sizes, key=lambda known: (abs(log(known) - wanted), known))])


def _median(values: _Sorted) -> float:
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _span(middle_s: float, spread: tuple[float, float]) -> Span:
    low, high = spread
    return Span(low * middle_s, middle_s, high * middle_s)
