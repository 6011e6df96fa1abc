"""Text generation: tokens per second and latency per prompt.

*Prefill* reads the prompt in one step and is bound by arithmetic; its end is the time to first
token (TTFT). *Decoding* reads every weight for each token and is bound by memory bandwidth; larger
batches share that reading, so tokens/s grow while each prompt waits longer. Decoding is greedy, so
every run does the same work. Tokens count up to and including the first end-of-sequence token.
Prompt i goes to (data-parallel) rank i mod world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from workloads.base import (
    END_TOKEN_IDS,
    PROMPTS_CUT,
    PROMPTS_LEFT_OUT,
    TOKENS,
    BadConfiguration,
    JobContext,
    JobDescription,
    Metric,
    Refusal,
    Request,
    Result,
    Sample,
)
from workloads.bench.measure import load_resident, measure_resident
from workloads.bench.profiling import PROFILE, Profile, profiled
from workloads.bench.warmup import WarmupPlan
from workloads.data.datasets import DatasetParameters, load_dataset
from workloads.data.shapes import Example
from workloads.devices import device_spec
from workloads.devices.base import Device
from workloads.engines import ENGINES, engine_function, find_engine
from workloads.engines.loaded import EngineLoader, Generation, GenerationEngine
from workloads.engines.passes import BatchedPass, ContinuousPass, Prompt, check_length
from workloads.inspection.configuration import vocabulary_size
from workloads.models import attention
from workloads.models.catalog import known_config
from workloads.models.prompts import NotRendered, prompt_details, prompt_notes, prompt_refusals
from workloads.models.rules import quantised_refusals
from workloads.quality import METRICS, NO_FIGURES, finite_or_not, quality_figures
from workloads.registry import WorkloadSpec
from workloads.settings import (
    ADAPTER,
    amount_in_id,
    choice_in_id,
    neutral,
    neutral_in_id,
    work,
    work_in_id,
)
from workloads.training.pairs import SourceParameters
from workloads.training.parallel.layout import Layout, generation_refusals


def batching_refusals(asked: JobDescription) -> Iterator[Refusal]:
    """Refusals of continuous batching in this job; sorting goes with everything."""
    if asked.parameters.get("batching") != "continuous":
        return
    if asked.parameters.get("profile"):
        reason = "a profile watches one static batch, which batching continuous never runs"
        hint = "write batching: static, or leave profile out"
        yield Refusal(setting="profile", reason=reason, hint=hint, unsupported=True)
    hint, device = "use batching static or sorted", device_spec(asked.device)
    if "continuous_batching" not in find_engine(asked.engine).features:
        reason = f"the engine {asked.engine} does not do continuous batching"
        able = [
            spec.name
            for spec in ENGINES.known()
            if "continuous_batching" in spec.features and spec.runs_on(asked.device)
        ]
        if able and device.can("dynamic_shapes"):
            hint = f"write engine: {' or '.join(able)}"
    elif not device.can("dynamic_shapes"):
        reason = (
            f"rows that come and go change shapes at every step, which {device.title} compiles anew"
        )
    else:
        return
    yield Refusal(setting="batching", reason=reason, hint=hint, unsupported=True)


def refuse(asked: JobDescription) -> tuple[Refusal, ...]:
    """Objections to a job beyond those of its engine and model."""
    return (
        *generation_refusals(asked),
        *batching_refusals(asked),
        *attention.refusals(asked),
        *quantised_refusals(asked),
        *_quality_refusals(asked),
        *prompt_refusals(asked),
    )


def _quality_refusals(asked: JobDescription) -> Iterator[Refusal]:
    of = asked.parameters.get("quality_of")
    if of is None:
        return
    if not asked.parameters.get("quality"):
        reason = "without `quality` nothing is compared"
        hint = "write quality: true, or leave quality_of out"
        yield Refusal(setting="quality_of", reason=reason, hint=hint)
    sizes = [vocabulary_size(known_config(name) or {}) for name in (str(of), asked.model)]
    if None not in sizes and sizes[0] != sizes[1]:
        yield Refusal(
            setting="quality_of",
            reason=f"{of} has a vocabulary of {sizes[0]:,} tokens and {asked.model} one of "
            f"{sizes[1]:,}, so their texts cannot be compared",
            hint="name a model with the same tokenizer",
        )


class TextGenerationParameters(SourceParameters, DatasetParameters):
    """Greedy text generation over the prompts of a dataset."""

    output_tokens: int = amount_in_id(
        128, description="Most tokens to generate for each prompt (max_new_tokens)."
    )
    input_tokens: int | None = amount_in_id(
        None,
        description="Length every prompt is brought to, in tokens: a longer one is cut at its "
        "end, a shorter one repeated from its beginning. Left out, prompts stay as they are.",
    )
    ignore_eos: bool = work_in_id(
        False,
        description="Fixed-length mode: every prompt generates exactly output_tokens, even past "
        "an end-of-sequence token. Use it to compare precisions and devices, since then all of "
        "them do the same amount of work.",
    )
    too_long: Literal["error", "cut", "skip"] = work(
        "error",
        description="What becomes of prompts that leave the model no room for output_tokens: the "
        "job fails, they are cut at their end, or left out; the row counts them.",
    )
    prompts: int = amount_in_id(
        100,
        description="How many prompts of the dataset one repeat covers, all cards together, in "
        "the dataset's order and from its start again where it is shorter. At least one full "
        "batch on every card is used.",
    )
    batching: Literal["static", "sorted", "continuous"] = choice_in_id(
        "static",
        renamed={"refill": "continuous"},
        description="How prompts meet in a batch: static takes them in the dataset's order, sorted "
        "by length, so that less is padded; continuous (continuous batching) gives the place of a "
        "text that has ended to the next prompt and pads nothing (batch_size places; one pass over "
        "all prompts is one batch). Greedy texts are the same, up to rounding.",
    )
    attention: Literal["eager", "sdpa", "flash_attention_2", "xformers"] = choice_in_id(
        "sdpa",
        loads=True,
        description="Attention implementation: sdpa is PyTorch's scaled_dot_product_attention, "
        "eager plain matrix products, flash_attention_2 and xformers the kernels of the packages "
        "flash-attn and xformers (CUDA only; no card has run xformers).",
    )
    adapter: str | None = ADAPTER
    tensor_parallel: int | None = choice_in_id(
        None,
        loads=True,
        ge=1,
        description="Cards that split each matrix; groups of so many cards share out the prompts "
        "(data × tensor). Left out, every card has the whole model.",
    )
    keep_texts: int = neutral_in_id(
        3,
        ge=0,
        description="How many generated texts to keep in the row, from the first prompts on.",
    )
    profile: bool = PROFILE
    quality: bool = neutral(
        False,
        description="Compare what the model writes with the plain path (transformers in fp32), "
        "after the timed part: share of equal tokens, KL divergence, loss; and take the loss on "
        "the dataset's own answers. The plan adds the reference, once for a model and dataset.",
    )
    quality_of: str | None = neutral(
        None,
        consumes="model",
        min_length=1,
        description="The model whose texts are the reference of `quality`, of the same tokenizer: "
        "the one that a smaller model was made from. Left out, it is the model itself.",
    )


#: Figures of encoder and decoder apart, of sequence-to-sequence models.
ENCODER_METRICS = (
    Metric(
        name="summaries_per_s",
        title="summaries",
        unit="summaries/s",
        description="Texts that were written over the time of encoder and decoder.",
        better="higher",
        ranks="sum",
    ),
    Metric(
        name="encoder_s",
        title="encoder",
        unit="s",
        description="The encoder's time for a batch, in the mean.",
        better="lower",
    ),
    Metric(
        name="decoder_s",
        title="decoder",
        unit="s",
        description="The time for a batch less the encoder's, in the mean.",
        better="lower",
    ),
)

SPEC = WorkloadSpec(
    name="text-generation",
    function="workloads.text_generation:run",
    also_called=("inference", "generate", "chat", "causal-lm"),
    parameters=TextGenerationParameters,
    summary="Greedy generation with a language model: tokens/s, TTFT, latency.",
    ability="generate",
    tasks=("causal-lm", "seq2seq-lm"),
    throughput=TOKENS,
    metrics=(*METRICS, *ENCODER_METRICS),
    refuse=refuse,
    notes=lambda job: tuple(prompt_notes(job)),
    moved={"hpu_mode": None, "packed_weights": False},
)


def encoder_figures(samples: Sequence[Sample]) -> Mapping[str, float]:
    """Encoder and decoder figures of one card's timed samples; empty without an encoder."""
    timed = [s for s in samples if not s.warmup and s.complete and s.encoder_s is not None]
    took_s = math.fsum(sample.wall_s for sample in timed)
    if took_s <= 0:
        return {}
    encoder_s = math.fsum(sample.encoder_s or 0.0 for sample in timed)
    return {
        "summaries_per_s": sum(sample.items for sample in timed) / took_s,
        "encoder_s": encoder_s / len(timed),
        "decoder_s": (took_s - encoder_s) / len(timed),
    }


def run(request: Request, context: JobContext) -> Result:
    """Measure text generation; see ``workloads.base.Workload``."""
    parameters = TextGenerationParameters.model_validate(dict(request.parameters))
    context.device.seed(0)
    context.enter_phase("load")
    load: EngineLoader = engine_function(request.engine, "generate", context.device.name)
    resident, load_s = load_resident(request, context, load)
    engine: GenerationEngine = resident.engine
    layout = Layout(
        rank=context.rank, world_size=context.world_size, tensor=parameters.tensor_parallel or 1
    )
    began = context.clock()
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts, left_out = _prompts(request, parameters, engine, layout, dataset.examples, context)
    tokenization_s = context.clock() - began
    # Gathered, so that all ranks refuse a prompt that only one of them has.
    longest = max(context.collective.gather(max(len(prompt.ids) for prompt in prompts)))
    check_length(longest, parameters.output_tokens, engine)
    size = len(prompts) if parameters.batching == "continuous" else request.batch_size
    order = prompts
    if parameters.batching == "sorted":
        order = sorted(prompts, key=lambda prompt: len(prompt.ids))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    # Loading passes through more memory than running; the peaks are those of running.
    context.device.release_memory()
    context.device.reset_peak_memory()
    settings: dict[str, Any] = {
        "output_tokens": parameters.output_tokens,
        "ignore_eos": parameters.ignore_eos,
        "keep_texts": parameters.keep_texts,
        "clock": context.clock,
        "synchronize": context.device.synchronize,
    }
    generation: BatchedPass | ContinuousPass
    if parameters.batching == "continuous":
        generation = ContinuousPass(engine, prompts, request.batch_size, **settings)
    else:
        generation = BatchedPass(engine, batches, counts=layout.counts, **settings)
    spec = find_engine(request.engine)
    measured, result = measure_resident(
        resident,
        context,
        generation.run_batch,
        len(batches),
        request.measure,
        counted=spec.counts_compilations,
        plan=WarmupPlan(
            shapes=[
                (len(batch), engine.padded_length(max(len(prompt.ids) for prompt in batch)))
                for batch in batches
            ],
            passes=spec.warmup_passes,
            compiled=not context.device.spec.can("dynamic_shapes")
            or bool(request.settings.get("torch_compile")),
        ),
        together=layout.model_parallel > 1,
    )
    profile, quality = Profile(), NO_FIGURES
    if parameters.profile and not request.probe:
        first = batches[0][: request.batch_size]
        profile = _profile(engine, first, min(2, parameters.output_tokens), context.device)
    if parameters.quality and not request.probe:
        quality = quality_figures(resident, request, context, parameters.reading(), dataset)
    items, detokenization_s = generation.texts.of(measured.representative_repeat, context.clock)
    ends = " ".join(map(str, sorted(engine.end_token_ids)))
    flag = {}
    if not request.probe:
        answers = generation.texts.answers(measured.representative_repeat, prompts)
        flag = finite_or_not(engine, answers, context)
    return replace(
        result,
        items=items,
        load_s=load_s,
        tokenization_s=tokenization_s,
        detokenization_s=detokenization_s,
        synthetic_data=dataset.synthetic,
        metrics={
            **result.metrics,
            **encoder_figures(measured.samples),
            **quality.metrics,
            **(engine.source.metrics() if load_s else {}),
        },
        details={
            **result.details,
            **dataset.details,
            **left_out,
            **prompt_details(engine.tokenizer),
            **profile.details,
            **quality.details,
            **flag,
            **({} if parameters.ignore_eos else {END_TOKEN_IDS: ends}),
        },
        trace=profile.trace if context.rank == 0 else None,
    )


def bring_to_length(ids: Sequence[int], length: int) -> list[int]:
    """The ids cut at their end, or repeated from their beginning, to exactly ``length``."""
    repeated = list(ids) * -(-length // len(ids))
    return repeated[:length]


def _profile(
    engine: GenerationEngine, prompts: Sequence[Prompt], output_tokens: int, device: Device
) -> Profile:
    """Profile prefill and one decoding step, after one warm-up."""
    prepared = engine.prepare([prompt.ids for prompt in prompts])

    def step() -> None:
        engine.generate(prepared, Generation(output_tokens=output_tokens))()

    step()
    return profiled(step, device)


def _prompts(
    request: Request,
    parameters: TextGenerationParameters,
    engine: GenerationEngine,
    layout: Layout,
    examples: Sequence[Example],
    context: JobContext,
) -> tuple[list[Prompt], dict[str, str]]:
    """This rank's prompts of a repeat, in order, and what the row says of those that were cut or
    left out. All ranks leave out the same; if these are more than the others, the job fails."""
    total = max(parameters.prompts, request.batch_size * layout.data_size)
    room = _room(engine, parameters.output_tokens) if parameters.too_long != "error" else None
    encoded: dict[int, Sequence[int]] = {}
    left_out: dict[int, str] = {}
    while True:
        usable = list(islice((n for n in range(len(examples)) if n not in left_out), total))
        if len(left_out) > len(usable):
            raise BadConfiguration(next(iter(left_out.values())))
        mine = [
            usable[position % len(usable)]
            for position in range(layout.data_rank, total, layout.data_size)
        ]
        refused: dict[int, str] = {}
        for index in dict.fromkeys(mine):
            if index in encoded:
                continue
            try:
                ids = engine.encode(examples[index].content, examples[index].earlier)
            except NotRendered as error:
                refused[index] = str(error)
                continue
            if parameters.input_tokens is not None:
                ids = bring_to_length(ids, parameters.input_tokens)
            encoded[index] = ids
            if room is not None and len(ids) > room and parameters.too_long == "skip":
                refused[index] = f"{len(ids)} tokens, and the model has room for {room}"
        gathered = [pair for part in context.collective.gather(refused) for pair in part.items()]
        if not gathered:
            break
        left_out |= gathered
    details = {}
    if left_out:
        first = next(iter(left_out.values()))
        details[PROMPTS_LEFT_OUT] = f"{len(left_out):,}; the first: {first}"
    cut = len({n for n in mine if room is not None and len(encoded[n]) > room})
    if cut_by_all := sum(context.collective.gather(cut)):
        details[PROMPTS_CUT] = f"{cut_by_all:,}, to {room} tokens"
    return [Prompt(index=n, ids=tuple(encoded[n][:room])) for n in mine], details


def _room(engine: GenerationEngine, output_tokens: int) -> int | None:
    """Most tokens of a prompt; None without a limit, or where no prompt fits."""
    limits = [limit for limit in (engine.context_length, engine.window) if limit is not None]
    room = min(limits) - output_tokens if limits else 0
    return room if room > 0 else None
