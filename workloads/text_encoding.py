"""Text encoding: how many texts an encoder such as BERT reads in a second.

Texts are tokenised and padded to the longest of their batch before the clock starts; timed is one
forward pass for each batch, to the logits of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from workloads.base import (
    SAMPLES,
    BadConfiguration,
    JobContext,
    Request,
    Result,
    reporting_phases_to,
)
from workloads.bench.measure import Observation, instruments_of, measure
from workloads.bench.warmup import WarmupPlan
from workloads.data.datasets import DatasetParameters, load_dataset
from workloads.devices.monitor.host import HostMemoryPeak, resident_bytes
from workloads.engines import engine_function
from workloads.engines.base import figures_of
from workloads.models.precision import ModelWeights
from workloads.registry import WorkloadSpec
from workloads.settings import setting


class TextEncodingParameters(DatasetParameters):
    """Forward passes of an encoder over the texts of a dataset."""

    texts: int = setting(
        128,
        role="work",
        length=True,
        ge=1,
        description="How many texts of the dataset are read in a repeat, from its start again "
        "where it is shorter.",
    )
    max_length: int = setting(
        128,
        role="work",
        length=True,
        ge=2,
        description="Most tokens of a text; a longer one is cut at its end.",
    )


SPEC = WorkloadSpec(
    name="text-encoding",
    function="workloads.text_encoding:run",
    parameters=TextEncodingParameters,
    summary="Forward passes of an encoder (BERT) over texts: samples/s.",
    ability="encode",
    tasks=("masked-lm",),
    dataset="english-corpus-synthetic",
    throughput=SAMPLES,
)


class Encoder(Protocol):
    """One loaded encoder: what text encoding asks of it, whichever library it is."""

    @property
    def weights(self) -> ModelWeights:
        """Bytes, count and format of the loaded weights."""

    @property
    def random_weights(self) -> bool:
        """True if the weights were drawn, not trained."""

    @property
    def details(self) -> Mapping[str, str]:
        """Further details for the row."""

    def ids(self, text: str, max_length: int) -> list[int]:
        """Ids of one text, cut at its end."""

    def prepare(self, texts: Sequence[Sequence[int]]) -> Any:
        """A padded batch ready on the card."""

    def logits(self, prepared: Any) -> Any:
        """The logits [rows, positions, vocabulary] of a batch."""


def run(request: Request, context: JobContext) -> Result:
    """Measure text encoding; see ``workloads.base.Workload``."""
    parameters = TextEncodingParameters.model_validate(dict(request.parameters))
    if request.batch_size < 1:
        raise BadConfiguration(f"batch size {request.batch_size}; at least 1 is needed")
    context.device.seed(0)
    context.enter_phase("load")
    (encoder, baseline), load_s = _resident(request, context)
    dataset = load_dataset(request.dataset, parameters.reading())
    began = context.clock()
    size = request.batch_size
    total = max(parameters.texts, size * context.world_size)
    mine = range(context.rank, total, context.world_size)
    examples = dataset.examples
    texts = [
        encoder.ids(examples[index % len(examples)].content, parameters.max_length)
        for index in mine
    ]
    tokenization_s = context.clock() - began
    batches = [texts[start : start + size] for start in range(0, len(texts), size)]
    prepared = [encoder.prepare(batch) for batch in batches]
    context.device.release_memory()
    context.device.reset_peak_memory()

    def run_batch(repeat: int, batch: int) -> Callable[[], Observation]:
        encoder.logits(prepared[batch])
        context.device.synchronize()
        observed = Observation(
            items=len(batches[batch]),
            input_tokens=sum(map(len, batches[batch])),
            computed_tokens=len(batches[batch]) * max(map(len, batches[batch])),
        )
        return lambda: observed

    with HostMemoryPeak() as host_memory:
        measured = measure(
            run_batch,
            len(batches),
            request.measure,
            instruments_of(context),
            WarmupPlan(shapes=[(len(batch), max(map(len, batch))) for batch in batches]),
        )
    return Result(
        samples=measured.samples,
        stop_reason=measured.stop_reason,
        load_s=load_s,
        **measured.warmup,
        weight_bytes=encoder.weights.weight_bytes,
        parameter_count=encoder.weights.parameter_count,
        baseline_host_memory_bytes=baseline,
        peak_host_memory_bytes=host_memory.bytes,
        peak_device_memory_bytes=context.device.peak_memory_bytes(),
        tokenization_s=tokenization_s,
        random_weights=encoder.random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=encoder.weights.detail,
        metrics=figures_of(encoder),
        details={
            **encoder.details,
            **measured.details,
            "host_memory_peak": host_memory.method,
        },
    )


def _resident(request: Request, context: JobContext) -> tuple[tuple[Encoder, int], float]:
    """The loaded encoder with the host memory in use before it, and how long loading took."""
    load = engine_function(request.engine, "encode", context.device.name)
    took: list[float] = []

    def loader() -> tuple[Encoder, int]:
        context.device.release_memory()
        baseline, began = resident_bytes(), context.clock()
        with reporting_phases_to(context.enter_phase):
            encoder = load(request, context.device)
        context.device.synchronize()
        took.append(context.clock() - began)
        return encoder, baseline

    loaded = context.resident(request.residency_key, loader)
    return loaded, took[0] if took else 0.0
