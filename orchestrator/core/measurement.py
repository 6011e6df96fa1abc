"""Row of an attempt, successful or not, in the result tables.

Raw samples are stored and statistics derived from them, so later versions can compute better ones.
Times are seconds, sizes bytes. A repeat's sums are over all ranks, its time is the slowest's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import NamedTuple

from orchestrator.core.job import Accelerator, Job, Scalar, State
from orchestrator.core.outcome import Purpose
from orchestrator.core.readings import Source
from workloads.base import Item, MeasureSettings, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures derived from the samples of the steady state. None where one does not apply."""

    generated_tokens_per_s: float | None = None  # up to and including end-of-sequence, all cards
    total_tokens_per_s: float | None = None  # real input and generated tokens
    items_per_s: float | None = None  # prompts, or training samples
    # Of what the workload declares: generated_tokens_per_s or items_per_s.
    throughput: float | None = None
    throughput_unit: str = ""  # such as tokens/s
    throughput_low: float | None = None  # confidence interval over repeats
    throughput_high: float | None = None
    relative_half_width: float | None = None
    repeats: int = 0  # complete, timed
    processes: int = 1  # that the interval spans: more in a report's joined replicates
    ttft_s: float | None = None  # median over batches
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None  # time per output token after the first, one decoding step
    tpot_p95_s: float | None = None
    tpot_p99_s: float | None = None
    latency_p50_s: float | None = None  # of a prompt
    latency_p95_s: float | None = None
    measure_s: float | None = None  # wall time of the timed part
    cpu_s: float | None = None  # CPU time of the timed part, all ranks
    loss_first: float | None = None
    loss_last: float | None = None
    hump_ratio: float | None = None  # of repeats of two speeds; 1: of one
    # Of all cards in the timed part, its pauses included; None where it is not known.
    energy_j: float | None = None
    power_w: float | None = None
    energy_source: Source | None = None
    drift: float | None = None  # share by which a slow beginning slows the whole; below 0: slower

    @property
    def work_per_joule(self) -> float | None:
        """Tokens, or samples, for each joule of the cards: throughput over their mean power."""
        if not self.power_w or self.throughput is None:
            return None
        return self.throughput / self.power_w


class Doubt(NamedTuple):
    """Uncertainty of a row's figures; by name, of their natural logs."""

    deviations: Mapping[str, float] = {}  # standard errors
    better_by: Mapping[str, float] = {}  # how much better the truth may be: it is a bound
    flags: str = ""  # for which it ranks nowhere; "" if there are none
    usable: bool = True  # whether its figures say anything about its setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row. Field order is column order (``store/schema.py``)."""

    # which run, which job, which try
    schema_version: int
    run: str
    invocation_id: str  # one per `nightgrid run`
    job_id: str
    attempt_id: str  # "<job_id>-0" for a row of a job that never ran
    attempt_number: int
    final: bool  # the job's terminal row of this invocation, or a repeat that replaces it
    purpose: Purpose
    recorded_at: float | None = None  # seconds since the epoch; when the driver made the row

    # settings
    experiment: str
    workload: str
    model: str
    dataset: str
    accelerator: Accelerator
    cards: int
    precision: str
    batch_size: int | None  # per card; None for a search when nothing fitted or ran
    batch_size_requested: str  # "8", "max", "best(cap=64)"
    engine: str
    isolation: str
    parameters: Mapping[str, Scalar]
    measure: MeasureSettings
    replicate: int = 1
    work_version: int = 1  # of the work that these settings stood for (``WorkloadSpec``)

    # outcome
    state: State
    reason: str
    failure_class: str | None = None
    failure_tail: str | None = None
    log: str | None = None  # host:path
    started_at: float | None = None  # seconds since the epoch
    ended_at: float | None = None

    # place
    nodes: tuple[str, ...] = ()
    card_indices: tuple[int, ...] = ()
    device_name: str | None = None
    driver_version: str | None = None
    emulated: bool = False

    # software
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    git_dirty: bool | None = None
    worker_pid: int | None = None
    threads: int | None = None
    niceness: int | None = None
    host_cores: int | None = None
    jobs_before: int | None = None
    model_was_resident: bool | None = None

    # the host's processors
    processor_cores: float | None = None  # kept busy in the timed part, by the rank with the fewest
    processor_wait_share: float | None = None  # of the timed part: runnable and not running
    stolen_share: float | None = None
    host_load: float | None = None
    queued_s: float | None = None  # waiting for a turn
    oversubscribed: bool | None = None

    # numbers
    metrics: Metrics = field(default_factory=Metrics)
    stop_reason: str | None = None
    load_s: float | None = None
    compile_s: float | None = None
    warmup_s: float | None = None
    warmup_steps: int | None = None
    warmup_end: str | None = None
    shapes: int | None = None
    shapes_unmet: int | None = None
    timed_parts: int | None = None
    timed_compilations: int | None = None
    timed_cpu_fallbacks: int | None = None
    weight_bytes: int | None = None
    parameter_count: int | None = None
    trainable_parameter_count: int | None = None
    train_flops_per_token: float | None = None
    tokenization_s: float | None = None
    detokenization_s: float | None = None
    baseline_host_memory_bytes: int | None = None
    peak_host_memory_bytes: int | None = None
    peak_device_memory_bytes: int | None = None
    random_weights: bool | None = None
    synthetic_data: bool | None = None
    precision_detail: str | None = None
    #: Figures of all ranks, reported by the workload or derived (``registry.metrics_of``).
    workload_metrics: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)

    # raw, with the rank that measured it
    samples: tuple[tuple[int, Sample], ...] = ()
    items: tuple[tuple[int, Item], ...] = ()
    image: bytes | None = None

    @property
    def job(self) -> Job:
        """The job that was measured, with its final batch size."""
        names = {field.name for field in fields(Job)}
        values = {name: getattr(self, name) for name in names}
        values["batch_size"] = self.batch_size or self.batch_size_requested
        return Job(**values | {"parameters": tuple(sorted(self.parameters.items()))})

    def reported(self, name: str) -> float | None:
        """A figure reported by the workload; rows of version 0.1.0 have it in ``details``."""
        if name in self.workload_metrics:
            return self.workload_metrics[name]
        text = self.details.get(name)
        try:
            return None if text is None else float(text)
        except ValueError:
            return None


#: A sample with the rank that measured it.
Ranked = tuple[int, Sample]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over some samples, such as those of one repeat, all ranks together."""

    wall_s: float  # of the slowest rank
    items: int
    input_tokens: int
    output_tokens: int
    computed_tokens: int


def repeats_of(timed: Iterable[Ranked]) -> dict[int, list[Ranked]]:
    """The samples of each repeat, by repeat in order."""
    repeats: dict[int, list[Ranked]] = {}
    for pair in timed:
        repeats.setdefault(pair[1].repeat, []).append(pair)
    return dict(sorted(repeats.items())) if len(repeats) > 1 else repeats


def complete_of(repeats: Mapping[int, Sequence[Ranked]]) -> dict[int, Sequence[Ranked]]:
    """The repeats that every rank finished."""
    ranks = {rank for pairs in repeats.values() for rank, _ in pairs}
    return {
        number: pairs
        for number, pairs in repeats.items()
        if all(sample.complete for _, sample in pairs) and {rank for rank, _ in pairs} == ranks
    }


def timed_repeats(samples: Iterable[Ranked]) -> dict[int, Sequence[Ranked]]:
    """The timed repeats that every rank finished."""
    return complete_of(repeats_of([pair for pair in samples if not pair[1].warmup]))


def totals_of(pairs: Iterable[Ranked]) -> Totals:
    """Add samples up."""
    walls: dict[int, list[float]] = {}
    items = input_tokens = output_tokens = computed_tokens = 0
    for rank, sample in pairs:
        walls.setdefault(rank, []).append(sample.wall_s)
        items += sample.items
        input_tokens += sample.input_tokens
        output_tokens += sample.output_tokens
        computed_tokens += sample.computed_tokens
    return Totals(
        wall_s=max((math.fsum(values) for values in walls.values()), default=0.0),
        items=items,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        computed_tokens=computed_tokens,
    )


def sum_of(totals: Iterable[Totals]) -> Totals:
    """Totals of several repeats in sequence."""
    columns = zip(*map(astuple, totals), strict=True)
    wall_s, *counts = columns
    return Totals(math.fsum(wall_s), *map(sum, counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One figure of one cell. Field order is the order of the columns."""

    job_id: str  # of the cell's first replicate
    label: str  # of the cell among those of its grid
    workload: str
    model: str
    dataset: str
    accelerator: str
    cards: int
    precision: str
    batch_size: str
    engine: str
    figure: str  # such as throughput
    value: float  # median of what a measurement is expected to give
    low: float  # 95 % of measurements are expected between low and high
    high: float
    log_deviation: float  # standard deviation of the natural log of a measurement
    runs: float  # probability that the cell can be measured at all
    measured: int  # cells of the same run that it rests on
    earlier: int  # cells of other runs that it rests on
    basis: str  # the same in words, with the prior

    @property
    def plus_minus(self) -> float:
        """Half of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value
