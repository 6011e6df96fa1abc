"""One untimed pass of generation over a dataset's prompts, for workloads that ask what comes out
rather than how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.base import BadConfiguration, JobContext, Request, Result, Sample, Unsupported
from workloads.data.datasets import Dataset
from workloads.engines.base import Generated, GenerationEngine, figures_of

if TYPE_CHECKING:
    import torch

    from workloads.workloads.quality_reference import QualityReferenceParameters
    from workloads.workloads.verification import VerificationParameters

#: Ids of one prompt.
Prompt = tuple[int, ...]


def encoded_prompts(engine: GenerationEngine, dataset: Dataset, count: int) -> tuple[Prompt, ...]:
    """Ids of the first ``count`` prompts; a shorter dataset begins again."""
    examples = dataset.examples
    chosen = (examples[index % len(examples)] for index in range(count))
    return tuple(tuple(engine.encode(one.content, one.earlier)) for one in chosen)


def result_of(
    engine: GenerationEngine,
    dataset: Dataset,
    sample: Sample,
    *,
    load_s: float = 0.0,
    metrics: Mapping[str, float] | None = None,
    details: Mapping[str, str],
) -> Result:
    """The result of a pass, with what is known of the engine and the dataset."""
    return Result(
        samples=(sample,),
        stop_reason="max_repeats",
        load_s=load_s,
        weight_bytes=engine.weights.weight_bytes,
        parameter_count=engine.weights.parameter_count,
        random_weights=engine.random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=engine.weights.detail,
        metrics={**figures_of(engine), **(metrics or {})},
        details={**engine.details, **details},
    )


def continued(
    engine: GenerationEngine,
    request: Request,
    context: JobContext,
    dataset: Dataset,
    parameters: QualityReferenceParameters | VerificationParameters,
) -> tuple[tuple[Prompt, ...], list[list[int]], list[torch.Tensor], Sample]:
    """The prompts of a dataset that a job asks for; for each the tokens that an engine writes after
    it and their logits [steps, vocabulary]; and the pass."""
    encoded = encoded_prompts(engine, dataset, parameters.prompts)
    context.enter_phase("measure")
    batches, sample = generate_once(
        engine,
        context,
        encoded,
        batch_size=request.batch_size,
        output_tokens=parameters.output_tokens,
        on_step=lambda: None,
        keep_logits=True,
    )
    return encoded, *by_prompt(batches), sample


def check_length(longest: int, output_tokens: int, engine: GenerationEngine) -> None:
    """
    Raises:
        Unsupported: the model would see a part of the texts, and the engine sees them whole.
        BadConfiguration: the model has not so many positions.
    """
    asked = f"the longest prompt has {longest} tokens and {output_tokens} are to be "
    total, room, window = longest + output_tokens, engine.context_length, engine.window
    if window is not None and total > window:
        raise Unsupported(
            f"{asked}generated, but layers of the model see {window} positions only, and those of "
            "the engine all; lower output_tokens, set input_tokens or use the engine transformers"
        )
    if room is not None and total > room:
        raise BadConfiguration(
            f"{asked}generated, which is more than the model's {room} positions; lower "
            "output_tokens or set input_tokens"
        )


def generate_once(
    engine: GenerationEngine,
    context: JobContext,
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    output_tokens: int,
    on_step: Callable[[], None],
    keep_logits: bool = False,
) -> tuple[list[Generated], Sample]:
    """Generate ``output_tokens`` for each prompt, batch by batch.

    Returns:
        What came out of each batch, and the whole pass as one sample.
    """
    check_length(max(map(len, prompts)), output_tokens, engine)
    began, cpu_began = context.clock(), context.cpu_clock()
    found = []
    for start in range(0, len(prompts), batch_size):
        fetch = engine.generate(
            engine.prepare(prompts[start : start + batch_size]),
            output_tokens=output_tokens,
            ignore_eos=True,
            on_step=on_step,
            keep_logits=keep_logits,
        )
        found.append(fetch())
    context.device.synchronize()
    sample = Sample(
        repeat=0,
        batch=0,
        warmup=False,
        complete=True,
        wall_s=context.clock() - began,
        cpu_s=context.cpu_clock() - cpu_began,
        items=len(prompts),
        input_tokens=sum(map(len, prompts)),
        output_tokens=len(prompts) * output_tokens,
        computed_tokens=0,
    )
    return found, sample


def by_prompt(batches: Sequence[Generated]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """For each prompt of all batches its tokens, and its logits [steps, vocabulary]."""
    import torch

    tokens = [list(row) for batch in batches for row in batch.tokens]
    logits = [row for batch in batches for row in torch.stack(list(batch.logits), dim=1)]
    return tokens, logits
