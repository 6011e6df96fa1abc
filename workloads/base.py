"""Interface between jobs and models: a workload's request, result, errors and refusals.

Records are picklable. Times are seconds, sizes bytes, lengths tokens. Imports neither torch nor
Ray. Each subclass of ``WorkloadError`` is one class of failure in a row; ``Device.classify`` maps a
backend's errors to them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from workloads.devices.base import Device


class WorkloadError(Exception):
    """Base of all errors whose message is meant for the user as it stands."""


class Unsupported(WorkloadError):
    """This combination of settings cannot run on this device; not a fault."""


class BadConfiguration(WorkloadError):
    """The settings contradict each other or the model."""


class DataMissing(WorkloadError):
    """A model, checkpoint or dataset is not there, or incomplete."""


class NodeStorage(WorkloadError):
    """The node's disk or shared memory is full, over its quota, or gone."""


class OutOfMemory(WorkloadError):
    """The device's memory is exhausted."""


class CompileFailed(WorkloadError):
    """Graph compilation failed."""


class CardNotAcquired(WorkloadError):
    """The card is held by another process or does not exist."""


class CardFaulty(WorkloadError):
    """The card computes or remembers wrongly, or its driver reports a fault of it."""


class CollectiveFailed(WorkloadError):
    """A collective operation between the ranks of a gang failed."""


class ServerSilent(WorkloadError):
    """A server runs and emits nothing, though requests wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Support of a precision on a device: how it is done, or why it cannot be."""

    supported: bool
    means: str = ""  # how weights are stored and multiplied, when supported
    reason: str = ""  # why not, when unsupported
    packages: tuple[str, ...] = ()  # what it needs installed, beyond torch and transformers


def supported(means: str, *packages: str) -> Support:
    """A precision that a device has, and the packages that it needs there."""
    return Support(supported=True, means=means, packages=packages)


def unsupported(reason: str) -> Support:
    """A precision that a device lacks."""
    return Support(supported=False, reason=reason)


# Metrics: each is declared once, for results, tables, rankings, comparisons and documentation.
# A workload reports it per rank (``Result.metrics``), or ``figure`` derives it from raw samples.

_OF_RANKS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "largest": max,
    "smallest": min,
    "sum": math.fsum,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The timed part of an attempt, of all ranks: complete repeats without warm-up."""

    samples: Sequence[Sample]
    items: Sequence[Item]  # prompts of the last complete repeat, if the workload has prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure."""

    name: str  # in rows
    title: str  # in tables, with its unit beside it
    description: str  # one line
    unit: str = ""
    better: Literal["higher", "lower"] | None = None  # None: it only explains another figure
    #: Value from which a row's output counts as equal to the plain path's; shown beside speed.
    equal_from: float | None = None
    beside_speed: bool = False  # shown beside the throughput, as with ``equal_from``
    ranks: Literal["mean", "largest", "smallest", "sum"] = "mean"  # reduction over a gang's ranks
    #: Derives the figure from raw samples, or None if they lack it; unset: the workload reports it.
    figure: Callable[[Timed], float | None] | None = None
    #: Workloads and tasks whose rows have it (empty: all); unused if one of them declares it.
    of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Throughput of a workload, and its unit; more is always better."""

    unit: str  # e.g. tokens/s
    counts: Literal["output_tokens", "items"]  # field of ``Sample``


TOKENS = Throughput(unit="tokens/s", counts="output_tokens")
SAMPLES = Throughput(unit="samples/s", counts="items")


def of_ranks(
    declared: Mapping[str, Metric], reported: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Reduce the ranks' figures to the row's; undeclared figures are averaged."""
    names = dict.fromkeys(name for values in reported for name in values)
    return {
        name: _OF_RANKS[declared[name].ranks if name in declared else "mean"](
            [values[name] for values in reported if name in values]
        )
        for name in names
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """Settings of a job's timing: warm-up and stopping."""

    warmup: int = 1  # least untimed repeats; 0: none, so first use of each shape is timed
    min_repeats: int = 3
    max_repeats: int = 20
    confidence: float = 0.95  # level of the interval
    relative_half_width: float = 0.05  # stop when the interval is this tight
    time_limit_s: float = 120.0  # of the timed part
    warmup_limit_s: float = 1800.0  # of what comes before it
    least_s: float = 0.0  # of the timed part: repeats go on until then, so that energy can be read
    repeat_flagged: int = 1  # most further measurements of a row whose figure was disturbed


#: Phases of an attempt, in order. All but ``queued`` (waiting for CPUs) have a watchdog limit.
Phase = Literal["start", "install", "queued", "load", "compile", "warmup", "measure", "finish"]

StopReason = Literal["confidence", "max_repeats", "time_limit"]

#: Why warm-up ended: all shapes met and steps steady, or ``warmup_limit_s`` ran out.
WarmupEnd = Literal["complete", "limit"]

#: Detail of a row with the ids that end a text, for recounting its tokens.
END_TOKEN_IDS = "end_token_ids"

#: Details that count records of a dataset which were left out or changed.
RECORDS, NOT_RENDERED = "data", "not_rendered"
PROMPTS_LEFT_OUT, PROMPTS_CUT = "prompts_left_out", "prompts_cut"
LEFT_OUT = frozenset({RECORDS, NOT_RENDERED, PROMPTS_LEFT_OUT, PROMPTS_CUT})

#: Details that say why what was computed is no result of this model; such a row ranks nowhere.
NOT_FINITE, ONE_TOKEN = "not_finite", "one_token"  # outputs that are NaN; texts of one token
DIVERGED, NOTHING_LEARNED = "diverged", "nothing_learned"  # of training
OTHER_OUTPUTS = "other_outputs"  # far from those of the plain path


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One job as a workload sees it."""

    workload: str
    model: str
    dataset: str
    precision: str
    batch_size: int  # per card
    engine: str
    residency_key: str  # equal keys may share what ``JobContext.resident`` loaded
    parameters: Mapping[str, Any]  # the workload's own, validated
    measure: MeasureSettings
    settings: Mapping[str, Any] = field(default_factory=dict)  # the engine's own, validated
    probe: bool = False  # only test if the batch fits: run the most memory-hungry part once
    kept_as: str = ""  # name (run and job) for files that outlive an attempt; "": none do
    #: RUN-JOB, independent of a searched batch size, recorded with saved products; "": unknown.
    saved_by: str = ""
    attempt: int = 1  # number of this try at the job
    took: str = (
        ""  # savings of what it takes by name (``workloads/models/products.py``), for its row
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Raw timing of one batch of one repeat; statistics compare repeats (passes over equal work).

    A pass cut short by the time limit keeps its samples, all with ``complete`` false.
    """

    repeat: int  # from 0; warm-up repeats are numbered too
    batch: int  # from 0 within the repeat
    warmup: bool
    complete: bool  # whether the repeat it belongs to was finished
    wall_s: float
    cpu_s: float  # of this process, all threads
    items: int  # prompts or training samples
    input_tokens: int  # real ones, without padding
    output_tokens: int  # generated, up to and including end-of-sequence; 0 in training
    computed_tokens: int  # positions the device worked on, padding included
    ttft_s: float | None = None  # time to first token of the batch
    step_s: tuple[float, ...] = ()  # time of each decoding step after the first
    loss: float | None = None
    # Shares of a training step's wall time; None if unknown.
    data_s: float | None = None  # waiting for the batch
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    communication_s: float | None = None  # not hidden behind the others
    encoder_s: float | None = None  # of a generated batch: the encoder's pass; None: it has none
    # Shares of an image batch's wall time; None without images.
    text_encoding_s: float | None = None
    denoising_s: float | None = None  # all steps, and the drawing of latents before them
    decoding_s: float | None = None  # from latents to pixels
    conversion_s: float | None = None  # to images of the host


#: The one sample of work that is timed as a whole.
whole_sample = partial(
    Sample, repeat=0, batch=0, warmup=False, complete=True, output_tokens=0, computed_tokens=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One prompt of the last complete repeat: its lengths, its latency, what came out."""

    index: int  # position in the dataset
    input_tokens: int
    output_tokens: int
    latency_s: float  # of the batch up to this prompt's last token
    ttft_s: float | None = None
    output_text: str | None = None  # kept for the first few prompts
    output_ids: tuple[int, ...] | None = None  # of that text: the tokens that were counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One rank's measurement. Raw samples only: statistics are derived from them elsewhere."""

    samples: tuple[Sample, ...]
    items: tuple[Item, ...] = ()
    stop_reason: StopReason
    load_s: float = 0.0  # 0 when the model was resident already
    compile_s: float = 0.0
    warmup_s: float = 0.0
    warmup_steps: int | None = None  # untimed batches, optimizer steps and rehearsals
    warmup_end: WarmupEnd | None = None  # None without warm-up
    shapes: int | None = None  # distinct shapes of the timed part
    shapes_unmet: int | None = None  # of these, those not seen in warm-up
    timed_parts: int | None = None  # how often timing began; all but the last are warm-up
    timed_compilations: int | None = None  # graphs compiled in the timed part; None: not counted
    timed_cpu_fallbacks: int | None = None  # operations in it that a card left to the host
    weight_bytes: int | None = None
    parameter_count: int | None = None
    trainable_parameter_count: int | None = None  # None where nothing is trained
    train_flops_per_token: float | None = None  # of the linear layers, forward and backward
    tokenization_s: float | None = None  # for all prompts or samples, before timing
    detokenization_s: float | None = None  # for all texts of one repeat, after timing
    baseline_host_memory_bytes: int | None = None  # resident after imports, before the model
    peak_host_memory_bytes: int | None = None
    peak_device_memory_bytes: int | None = None
    random_weights: bool = False
    synthetic_data: bool = False
    precision_detail: str = ""  # what the precision meant here, e.g. "torchao int8 weight-only"
    metrics: Mapping[str, float] = field(default_factory=dict)  # by name (``Metric``)
    image: bytes | None = None  # the first that was made, as PNG
    trace: bytes | None = None  # of a profile, gzipped; a file of its own beside the rows
    requests: bytes | None = None  # of a load, as an Arrow IPC file; likewise
    details: Mapping[str, str] = field(default_factory=dict)  # anything else worth a column


class Collective(Protocol):
    """Collective operations of a gang's ranks. The one-card implementation returns its input."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """Everything of the outside world that a workload may use."""

    device: Device
    rank: int
    world_size: int
    collective: Collective
    enter_phase: Callable[[Phase], None]
    resident: Callable[[str, Callable[[], Any]], Any]  # (residency key, loader) -> loaded
    clock: Callable[[], float]  # monotonic seconds
    cpu_clock: Callable[[], float]  # CPU seconds of this process


class Workload(Protocol):
    """A module-level function with this shape is a workload (``registry.py`` names it)."""

    def __call__(self, request: Request, context: JobContext) -> Result:
        """Run one job on this rank's card; known failures raise a ``WorkloadError``."""


# Refusals: a rule's objections to a job, before anything is loaded. Pure, no torch. A job that
# contradicts itself makes the grid invalid; one that a device cannot run becomes a row.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """A job as rules see it: its settings and the kind of device it would run on."""

    model: str
    dataset: str
    precision: str
    device: str  # by its name, as in ``workloads/devices``
    batch_size: int | str  # per card; text: it is searched for
    cards: int
    parameters: Mapping[str, Any]  # the workload's own, all of them
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Reason why a job is refused, and the setting to blame."""

    setting: str  # a job field or a parameter, for the location in the grid's file
    reason: str
    hint: str = ""  # what would be right
    unsupported: bool = False  # True: a row says so; False: wrong everywhere, the grid is refused


def require(refusals: Sequence[Refusal]) -> None:
    """Raise BadConfiguration, else Unsupported, for the first such refusal, if any."""
    for refusal in sorted(refusals, key=lambda refusal: refusal.unsupported):
        hint = f"; {refusal.hint}" if refusal.hint else ""
        text = f"{refusal.setting}: {refusal.reason}{hint}"
        raise Unsupported(text) if refusal.unsupported else BadConfiguration(text)


def require_package(package: str, who: str, install: str = "") -> None:
    """Raise Unsupported without a package (pip's name) that ``who`` needs."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise Unsupported(
            f"{who} needs the package '{package}', which is not installed here; install it with: "
            f"pip install {install or package}"
        )


# Lets code called by a library (which may compile for minutes while loading) report the phase.

_enter: ContextVar[Callable[[Phase], None] | None] = ContextVar("phase", default=None)


@contextlib.contextmanager
def reporting_phases_to(enter_phase: Callable[[Phase], None]) -> Iterator[None]:
    """Send phases from ``report_phase`` to ``enter_phase`` within the block."""
    before = _enter.set(enter_phase)
    try:
        yield
    finally:
        _enter.reset(before)


def report_phase(phase: Phase) -> None:
    """Report the phase; outside of a job this does nothing."""
    if enter := _enter.get():
        enter(phase)
