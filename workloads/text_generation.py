"""Text generation: how fast a model on a device writes, and how long each prompt waits.

Generating has two phases. *Prefill* reads the whole prompt in one step and is bound by arithmetic;
its end is the time to first token (TTFT). *Decoding* then makes one token a step, reads every
weight for it and is bound by memory bandwidth; its steps are the time per output token. A larger
batch shares one reading of the weights among more prompts, so tokens/s grow while every prompt
waits longer: that is why precision and batch size are the axes of a grid.

Decoding is greedy, so that every run does the same work. Tokens count up to and including the
first end-of-sequence token; padding and what follows the end does not count. On several cards the
prompts are dealt out in turn (data-parallel): prompt i goes to rank i mod world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from workloads.base import (
    END_TOKEN_IDS,
    BadConfiguration,
    Item,
    JobContext,
    Request,
    Result,
    reporting_phases_to,
)
from workloads.bench.measure import Observation, instruments_of, measure
from workloads.bench.profiling import Profile, profiled
from workloads.bench.warmup import WarmupPlan
from workloads.data.datasets import load_dataset
from workloads.devices.monitor.host import HostMemoryPeak, resident_bytes
from workloads.engines import engine_function, find_engine
from workloads.engines.base import EngineLoader, Generated, GenerationEngine, figures_of
from workloads.generation.encoder_figures import figures
from workloads.generation.prompts import Prompt
from workloads.generation.texts import Texts
from workloads.one_pass import check_length
from workloads.training.parallel.layout import Layout
from workloads.workloads.text_generation import TextGenerationParameters

if TYPE_CHECKING:
    from workloads.data.shapes import Example
    from workloads.devices.base import Device
    from workloads.generation.continuous_generation import ContinuousGeneration
    from workloads.quality import Figures


_NOT_ASKED: Figures = ({}, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resident:
    """Model that stays loaded between jobs, and the memory in use before it."""

    engine: GenerationEngine
    baseline_host_memory_bytes: int
    #: Figures of quality and what rows say of them, by the reference that was compared with.
    quality: dict[str, Figures] = field(default_factory=dict)


def run(request: Request, context: JobContext) -> Result:
    """Measure text generation; see ``workloads.base.Workload``."""
    parameters = TextGenerationParameters.model_validate(dict(request.parameters))
    if request.batch_size < 1:
        raise BadConfiguration(f"batch size {request.batch_size}; at least 1 is needed")
    context.device.seed(0)
    context.enter_phase("load")
    resident, load_s = _resident(request, context)
    engine = resident.engine
    began = context.clock()
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts = _prompts(request, parameters, engine, context, dataset.examples)
    tokenization_s = context.clock() - began
    # Asked of all ranks, so that all refuse a prompt that only one of them has.
    longest = max(context.collective.gather(max(len(prompt.ids) for prompt in prompts)))
    check_length(longest, parameters.output_tokens, engine)
    batches = _batches(prompts, request.batch_size, parameters.batching)
    # Loading passes through more memory than running; the peaks are those of running.
    context.device.release_memory()
    context.device.reset_peak_memory()
    spec = find_engine(request.engine)
    generation: Generation | ContinuousGeneration
    if parameters.batching == "continuous":
        from workloads.generation.continuous_generation import ContinuousGeneration

        generation = ContinuousGeneration(
            engine,
            prompts,
            request.batch_size,
            parameters,
            context.clock,
            context.device.synchronize,
        )
    else:
        generation = Generation(
            engine,
            batches,
            parameters,
            context.clock,
            context.device.synchronize,
            counts=_layout(parameters, context).counts,
        )
    with HostMemoryPeak() as host_memory:
        measured = measure(
            generation.run_batch,
            len(batches),
            request.measure,
            instruments_of(context, counted=spec.counts_compilations),
            WarmupPlan(
                shapes=_shapes(batches, engine),
                passes=spec.warmup_passes,
                compiled=not context.device.spec.can("dynamic_shapes")
                or bool(request.settings.get("torch_compile")),
            ),
            together=_layout(parameters, context).model_parallel > 1,
        )
    peak_device_memory_bytes = context.device.peak_memory_bytes()
    watched = parameters.profile and not request.probe
    first = batches[0][: request.batch_size]
    profile = _profile(engine, first, parameters, context.device) if watched else Profile()
    quality, compared = _NOT_ASKED
    if parameters.quality and not request.probe:
        quality, compared = _quality(resident, request, context, dataset.examples)
    items, detokenization_s = generation.texts.told(measured.representative_repeat, context.clock)
    return Result(
        samples=measured.samples,
        items=items,
        stop_reason=measured.stop_reason,
        load_s=load_s,
        **measured.warmup,
        weight_bytes=engine.weights.weight_bytes,
        parameter_count=engine.weights.parameter_count,
        baseline_host_memory_bytes=resident.baseline_host_memory_bytes,
        peak_host_memory_bytes=host_memory.bytes,
        peak_device_memory_bytes=peak_device_memory_bytes,
        tokenization_s=tokenization_s,
        detokenization_s=detokenization_s,
        random_weights=engine.random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=engine.weights.detail,
        metrics={
            **figures_of(engine),
            **figures(measured.samples),
            **quality,
            **(engine.source.metrics() if load_s else {}),
        },
        details={
            **engine.details,
            **measured.details,
            **profile.details,
            **compared,
            **({} if parameters.ignore_eos else {END_TOKEN_IDS: _listed(engine.end_token_ids)}),
            "host_memory_peak": host_memory.method,
        },
        trace=profile.trace if context.rank == 0 else None,
    )


def count_output_tokens(ids: Sequence[int], end_token_ids: frozenset[int]) -> int:
    """Generated tokens up to and including the first end-of-sequence token."""
    for position, token in enumerate(ids):
        if token in end_token_ids:
            return position + 1
    return len(ids)


def bring_to_length(ids: Sequence[int], length: int) -> list[int]:
    """The ids cut at their end, or repeated from their beginning, to exactly ``length``."""
    repeated = list(ids) * -(-length // len(ids))
    return repeated[:length]


def share_of_rank(total: int, rank: int, world_size: int) -> range:
    """The positions of the prompts that a rank takes of each repeat."""
    return range(rank, total, world_size)


def _resident(request: Request, context: JobContext) -> tuple[_Resident, float]:
    """The loaded engine, and how long loading took: 0 when it was there already."""
    load: EngineLoader = engine_function(request.engine, "generate", context.device.name)
    took: list[float] = []

    def loader() -> _Resident:
        context.device.release_memory()
        baseline = resident_bytes()
        began = context.clock()
        with reporting_phases_to(context.enter_phase):
            engine = load(request, context.device)
        context.device.synchronize()
        took.append(context.clock() - began)
        return _Resident(engine=engine, baseline_host_memory_bytes=baseline)

    loaded = context.resident(request.residency_key, loader)
    return loaded, took[0] if took else 0.0


def _quality(
    resident: _Resident, request: Request, context: JobContext, examples: Sequence[Example]
) -> Figures:
    """Figures of quality of a loaded engine, taken once for as long as it is loaded."""
    from workloads import answer_loss
    from workloads.quality import beside_speed

    reading = TextGenerationParameters.model_validate(dict(request.parameters)).reading()
    known = resident.quality
    compared = beside_speed(resident.engine, request, context, reading, known=known)
    name = f"answers of {request.dataset} {reading}"
    found = known.get(name) or answer_loss.beside_speed(resident.engine, examples, context)
    if found[0]:
        known[name] = found
    return {**compared[0], **found[0]}, {**compared[1], **found[1]}


def _profile(
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    parameters: TextGenerationParameters,
    device: Device,
) -> Profile:
    """Watch the reading of prompts and one token after each, met once before."""
    prepared = engine.prepare([prompt.ids for prompt in prompts])

    def step() -> None:
        engine.generate(
            prepared,
            output_tokens=min(2, parameters.output_tokens),
            ignore_eos=True,
            on_step=lambda: None,
        )()

    step()
    return profiled(step, device)


def _layout(parameters: TextGenerationParameters, context: JobContext) -> Layout:
    return Layout(
        rank=context.rank,
        world_size=context.world_size,
        tensor=parameters.tensor_parallel or 1,
    )


def _prompts(
    request: Request,
    parameters: TextGenerationParameters,
    engine: GenerationEngine,
    context: JobContext,
    examples: Sequence[Example],
) -> list[Prompt]:
    """This rank's prompts of a repeat, in order."""
    layout = _layout(parameters, context)
    total = max(parameters.prompts, request.batch_size * layout.data_size)
    encoded: dict[int, tuple[int, ...]] = {}
    prompts = []
    for position in share_of_rank(total, layout.data_rank, layout.data_size):
        index = position % len(examples)
        if index not in encoded:
            ids = engine.encode(examples[index].content, examples[index].earlier)
            if parameters.input_tokens is not None:
                ids = bring_to_length(ids, parameters.input_tokens)
            encoded[index] = tuple(ids)
        prompts.append(Prompt(index=index, ids=encoded[index]))
    return prompts


def _batches(prompts: list[Prompt], size: int, batching: str) -> list[list[Prompt]]:
    """The prompts as they meet; those of one length stay in their order."""
    if batching == "continuous":
        return [prompts]
    if batching == "sorted":
        prompts = sorted(prompts, key=lambda prompt: len(prompt.ids))
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _listed(ids: Iterable[int]) -> str:
    return " ".join(map(str, sorted(ids)))


def _shapes(batches: list[list[Prompt]], engine: GenerationEngine) -> list[tuple[int, int]]:
    """Rows and positions of each batch, as the engine pads it."""
    return [
        (len(batch), engine.padded_length(max(len(prompt.ids) for prompt in batch)))
        for batch in batches
    ]


class Generation:
    """Runs batches and keeps what came out of each, by repeat."""

    def __init__(
        self,
        engine: GenerationEngine,
        batches: Sequence[Sequence[Prompt]],
        parameters: TextGenerationParameters,
        clock: Callable[[], float],
        synchronize: Callable[[], None],
        *,
        counts: bool = True,  # False where another rank counts the same prompts
    ) -> None:
        self._counts = counts
        self._engine = engine
        self._batches = batches
        self._parameters = parameters
        self._clock = clock
        self._synchronize = synchronize
        self._prepared = [engine.prepare([prompt.ids for prompt in batch]) for batch in batches]
        self.texts = Texts(engine.decode, parameters.keep_texts)

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        """Generate for one batch; the returned function counts, when the clock has stopped."""
        times: list[float] = []

        def on_step() -> None:
            self._synchronize()
            times.append(self._clock())

        began = self._clock()
        fetch = self._engine.generate(
            self._prepared[batch],
            output_tokens=self._parameters.output_tokens,
            ignore_eos=self._parameters.ignore_eos,
            on_step=on_step,
        )
        return lambda: self._observe(repeat, batch, fetch(), began, times)

    def _observe(
        self, repeat: int, batch: int, generated: Generated, began: float, times: list[float]
    ) -> Observation:
        prompts = self._batches[batch]
        # In fixed-length mode a token that would end the text is a token like any other.
        ends = frozenset[int]() if self._parameters.ignore_eos else self._engine.end_token_ids
        counts = [count_output_tokens(ids, ends) for ids in generated.tokens]
        # Engines may compute on behind the end of all texts: steps are counted before that is cut.
        steps = max(map(len, generated.tokens))
        each = len(times) >= steps  # else the engine told of the first step and the end
        told = zip(prompts, generated.tokens, counts, strict=True) if self._counts else ()
        for prompt, ids, count in told:
            item = Item(
                index=prompt.index,
                input_tokens=len(prompt.ids),
                output_tokens=count,
                latency_s=(times[count - 1] if each else times[-1]) - began,
                ttft_s=times[0] - began,
            )
            self.texts.add(repeat, item, ids[:count])
        return Observation(
            items=len(prompts) if self._counts else 0,
            input_tokens=sum(len(prompt.ids) for prompt in prompts) if self._counts else 0,
            output_tokens=sum(counts) if self._counts else 0,
            computed_tokens=generated.computed_tokens,
            ttft_s=times[0] - began,
            step_s=tuple(after - before for before, after in pairwise(times[:steps]))
            if each
            else (),
            encoder_s=generated.encoder_s,
        )
