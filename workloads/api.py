"""The seam between jobs and models: what a workload is given, and what it gives back.

All records are plain values that survive pickling, so a worker may live in any process. Times
are seconds, sizes bytes, lengths tokens. This module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from workloads.measure_settings import MeasureSettings as MeasureSettings

if TYPE_CHECKING:
    from workloads.devices.base import Device

#: The phases of an attempt, in order. A watchdog has a limit for each but ``queued``, in which a
#: job waits for its turn on processors that others use.
Phase = Literal["start", "queued", "load", "compile", "warmup", "measure", "finish"]

StopReason = Literal["confidence", "max_repeats", "time_limit"]

#: Why warm-up ended: all shapes were met and steps were steady, or ``warmup_limit_s`` ran out.
WarmupEnd = Literal["complete", "limit"]

#: The detail of a row by which its tokens can be counted again: the ids that end a text.
END_TOKEN_IDS = "end_token_ids"


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
    parameters: Mapping[str, Any]  # the workload's own, validated (``parameters.py``)
    measure: MeasureSettings
    settings: Mapping[str, Any] = field(default_factory=dict)  # the engine's own, validated
    probe: bool = False  # asked only whether the batch fits: do what takes most memory, once
    #: Name of the run and the job, for what outlives an attempt of it; "": nothing does.
    kept_as: str = ""
    #: Ids of the run and of the grid's job as RUN-JOB, whatever batch size a search has found, for
    #: the note of what the job saves under a name; "": no run is known.
    saved_by: str = ""
    attempt: int = 1  # number of this try at the job
    took: str = ""  # savings of what it takes by name (``workloads/products.py``), for its row


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One raw timed iteration: one batch of one repeat.

    A repeat is one pass over the same work; repeats are what the statistics compare. A pass cut
    short by the time limit keeps its samples, with ``complete`` false on each of them.
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
    # Shares of a training step's wall time; None where they are not known.
    data_s: float | None = None  # waiting for the batch
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    communication_s: float | None = None  # not hidden behind the others
    encoder_s: float | None = None  # of a generated batch: the encoder's pass; None: it has none
    # Shares of the wall time of a batch of images; None where there are none.
    text_encoding_s: float | None = None
    denoising_s: float | None = None  # all steps, and the drawing of latents before them
    decoding_s: float | None = None  # from latents to pixels
    conversion_s: float | None = None  # to images of the host


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
    warmup_end: WarmupEnd | None = None  # None where no warm-up was asked for
    shapes: int | None = None  # distinct shapes of the timed part
    shapes_unmet: int | None = None  # of these, those that warm-up has not met
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
    metrics: Mapping[str, float] = field(default_factory=dict)  # by name (``metrics.Metric``)
    image: bytes | None = None  # the first that was made, as PNG
    trace: bytes | None = None  # of a profile, gzipped; a file of its own beside the rows
    details: Mapping[str, str] = field(default_factory=dict)  # anything else worth a column


class Collective(Protocol):
    """Collective operations of a gang's ranks. The one-card implementation returns its input."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

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
        """Run one job on this rank's card.

        Raises:
            WorkloadError: a failure of a known class (``errors.py``).
        """
