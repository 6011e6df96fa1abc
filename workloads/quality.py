"""Quality beside speed: the distance of a fast path from the plain one on the same prompts.

The *reference* (workload quality-reference, which plans add) is the greedy text of stock
transformers in fp32, one prompt at a time, with the log-probabilities of the 64 likeliest tokens of
each step. After its timed part a job with ``quality: true`` generates from the same prompts; the
distributions are compared up to and including the first step at which the tokens differ.

A row has the share of equal tokens, a lower bound of the Kullback-Leibler divergence (tokens beyond
the 64 count as one), and both losses on the reference's texts; else ``details`` say why it was not
compared. The loss on a dataset's answers needs no reference: only the answer and its end token
count, as in transformers' loss of a text whose prompt has no labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from workloads.base import (
    NOT_FINITE,
    ONE_TOKEN,
    TOKENS,
    BadConfiguration,
    JobContext,
    Metric,
    OutOfMemory,
    Request,
    Result,
    Unsupported,
    WorkloadError,
)
from workloads.bench.measure import Resident, load_resident
from workloads.data.cache import build_aside, cache_root, file_lock
from workloads.data.datasets import Dataset, DatasetParameters, Reading, load_dataset
from workloads.data.shapes import Example
from workloads.engines import engine_function
from workloads.engines.loaded import Answered, EngineLoader, Generation, GenerationEngine
from workloads.engines.passes import by_prompt, continued, generate_once, result_of
from workloads.models.loading import open_model
from workloads.registry import WorkloadSpec
from workloads.settings import WorkloadParameters, amount, work
from workloads.training.pairs import SourceParameters
from workloads.training.saved_adapters import find_adapter
from workloads.util.contents import fingerprint, identity_of

if TYPE_CHECKING:
    import torch


class QualityReferenceParameters(SourceParameters, DatasetParameters):
    """The plain path's texts and probabilities; plans add such jobs by themselves."""

    prompts: int = amount(
        8, le=1000, description="How many prompts of the dataset are continued, from the first on."
    )
    output_tokens: int = amount(32, le=4096, description="How many tokens after each prompt.")
    adapter: str | None = work(
        None,
        loads=True,
        consumes="adapter",
        min_length=1,
        description="A trained adapter to put on the model.",
    )


SPEC = WorkloadSpec(
    name="quality-reference",
    function="workloads.quality:run",
    parameters=QualityReferenceParameters,
    summary="Texts and probabilities of the plain path, which `quality: true` compares with.",
    ability="generate",
    tasks=("causal-lm", "seq2seq-lm"),
    throughput=TOKENS,
    implied=True,
)


METRICS = (
    Metric(
        name="quality_top1_agreement",
        title="same tokens",
        description="Share of compared steps at which the plain path chooses the same token.",
        better="higher",
        equal_from=0.95,
    ),
    Metric(
        name="quality_kl",
        title="KL",
        unit="nats",
        description="Divergence of the next token's distribution from the plain path's, mean over "
        "compared steps; tokens beyond the 64 likeliest count as one.",
        better="lower",
    ),
    Metric(
        name="quality_loss",
        title="loss on the plain path's texts",
        unit="nats",
        description="Mean negative log-probability of the plain path's tokens.",
        better="lower",
    ),
    Metric(
        name="quality_reference_loss",
        title="the plain path's own",
        unit="nats",
        description="The same of the plain path itself.",
    ),
    Metric(
        name="quality_compared_tokens",
        title="steps compared",
        unit="tokens",
        description="Steps up to the first difference of each text from the plain path's.",
        better="higher",
    ),
    Metric(
        name="answer_loss",
        title="loss on the dataset's answers",
        unit="nats",
        description="Mean negative log-probability of the tokens of the dataset's first 8 answers, "
        "each read after its prompt, whose own tokens do not count.",
        better="lower",
    ),
)


#: Stored log-probabilities per step.
KEPT = 64
_FILE = "reference.safetensors"
#: Raise when what is computed changes: it is in the cache's keys.
_RECIPE = 1


class Quality(NamedTuple):
    """Figures by name, and what the row says beside them."""

    metrics: Mapping[str, float]
    details: Mapping[str, str]


NO_FIGURES = Quality({}, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Texts of the plain path, and the likeliest tokens of each step."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: torch.Tensor  # [prompts, steps]
    likeliest: torch.Tensor  # [prompts, steps, kept]: ids
    log_probabilities: torch.Tensor  # the same: of these


def reference_directory(
    model: str, dataset: str, reading: Reading, parameters: QualityReferenceParameters
) -> Path:
    """Cache directory for the reference of a model on a dataset's prompts, by their content."""
    seen = [
        model,
        fingerprint(Path(open_model(model, protected=True).path)),
        fingerprint(find_adapter(parameters.adapter)) if parameters.adapter else "",
        *(dataset, identity_of(dataset)),
        *(reading.columns, reading.split, reading.revision, reading.subset),
        *(parameters.prompts, parameters.output_tokens),
        *(parameters.source_prefix, parameters.max_source_length),
    ]
    digest = hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / f"quality-{_RECIPE}-{digest}"


def save(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    logits: Sequence[torch.Tensor],
) -> None:
    """Write a reference into an empty directory; ``logits`` are [steps, vocabulary] per prompt."""
    import torch
    from safetensors.torch import save_file

    likeliest = [
        torch.log_softmax(text.float(), -1).topk(min(KEPT, text.shape[-1])) for text in logits
    ]
    tensors = {
        "tokens": torch.tensor([list(ids) for ids in tokens]),
        "likeliest": torch.stack([top.indices for top in likeliest]).to(torch.int32),
        "log_probabilities": torch.stack([top.values for top in likeliest]),
    }
    written = json.dumps([list(ids) for ids in prompts])
    save_file(tensors, directory / _FILE, metadata={"prompts": written})


def load(directory: Path) -> Reference | None:
    """Read the reference in a directory; None if there is none."""
    from safetensors import safe_open

    if not (directory / _FILE).is_file():
        return None
    with safe_open(directory / _FILE, framework="pt") as file:
        return Reference(
            prompts=tuple(map(tuple, json.loads(file.metadata()["prompts"]))),
            tokens=file.get_tensor("tokens"),
            likeliest=file.get_tensor("likeliest").long(),
            log_probabilities=file.get_tensor("log_probabilities"),
        )


def compare(
    tokens: Sequence[Sequence[int]], logits: Sequence[torch.Tensor], reference: Reference
) -> dict[str, float]:
    """Compare an engine's texts; ``logits`` are float32 [steps, vocabulary] per prompt."""
    import torch

    same = steps = 0
    divergence = loss = reference_loss = 0.0
    for prompt, (mine, my_logits) in enumerate(zip(tokens, logits, strict=True)):
        theirs = reference.tokens[prompt].tolist()
        parted = next((n for n, token in enumerate(theirs) if mine[n] != token), None)
        count = len(theirs) if parted is None else parted + 1
        steps += count
        same += count - (parted is not None)
        ids = reference.likeliest[prompt, :count]
        known = reference.log_probabilities[prompt, :count].double()
        # Output layers may be padded to different sizes.
        mine_all = torch.log_softmax(my_logits[:count].double(), -1)
        mine_known = mine_all.gather(-1, ids.clamp(max=mine_all.shape[-1] - 1))
        divergence += float((known.exp() * (known - mine_known)).sum())
        # All other tokens count as one.
        rest, mine_rest = ((1 - p.exp().sum(-1)).clamp(min=1e-12) for p in (known, mine_known))
        divergence += float((rest * (rest / mine_rest).log()).sum())
        chosen = torch.tensor(theirs[:count]).unsqueeze(-1)
        loss -= float(mine_all.gather(-1, chosen).sum())
        reference_loss -= float(known[ids == chosen].sum())
    return {
        "quality_top1_agreement": same / steps,
        "quality_kl": max(divergence / steps, 0.0),
        "quality_loss": loss / steps,
        "quality_reference_loss": reference_loss / steps,
        "quality_compared_tokens": float(steps),
    }


def quality_figures(
    resident: Resident, request: Request, context: JobContext, reading: Reading, dataset: Dataset
) -> Quality:
    """Quality figures of a loaded engine, cached while it is loaded; all ranks must call this."""
    compared = _compared(resident, request, context, reading)
    name = f"answers of {request.dataset} {reading} {request.took}"
    answers = resident.known.get(name) or _answer_loss(resident.engine, dataset.examples, context)
    if answers.metrics:
        resident.known[name] = answers
    return Quality({**compared.metrics, **answers.metrics}, {**compared.details, **answers.details})


def _compared(
    resident: Resident, request: Request, context: JobContext, reading: Reading
) -> Quality:
    alike = {"adapter", *SourceParameters.model_fields} - WorkloadParameters.model_fields.keys()
    parameters = QualityReferenceParameters(
        **{name: request.parameters[name] for name in alike if name in request.parameters}
    )
    model = str(request.parameters.get("quality_of") or request.model)
    if request.parameters.get("quality_of"):
        parameters = parameters.model_copy(update={"adapter": None})
    name, reference, why = "", None, "its reference is not in the cache of every node"
    try:
        directory = reference_directory(model, request.dataset, reading, parameters)
        name, reference = directory.name, load(directory)
    except (OSError, WorkloadError, ValueError) as error:
        why = str(error)
    if all(context.collective.gather(name in resident.known)):
        known: Quality = resident.known[name]
        return known
    if not all(context.collective.gather(reference is not None)) or reference is None:
        return Quality({}, {"quality": f"not compared: {why}"})
    try:
        size = min(request.batch_size, len(reference.prompts))
        generation = Generation(output_tokens=parameters.output_tokens, keep_logits=True)
        batches, _ = generate_once(resident.engine, context, reference.prompts, size, generation)
    except Exception as error:
        return Quality({}, {"quality": f"not compared: {spared(error, context)}"})
    details = {"quality": f"compared with the plain path on {len(reference.prompts)} prompts"}
    tokens, logits = by_prompt(batches)
    if all(end_run(ids) == 0 for ids in tokens) and all(map(end_run, reference.tokens.tolist())):
        details[ONE_TOKEN] = f"each of {len(tokens)} texts is one token repeated"
    figures = Quality(compare(tokens, logits, reference), details)
    resident.known[name] = figures
    return figures


def spared(error: Exception, context: JobContext) -> str:
    """Describe an error that must not cost the row; raise any other again."""
    failure = context.device.classify(error)
    if not isinstance(failure, (Unsupported, OutOfMemory, BadConfiguration)):
        raise error
    return f"{type(failure).__name__}: {failure}"


#: Most texts whose logits are looked at, and most tokens of each.
_TEXTS_LOOKED_AT, _TOKENS_LOOKED_AT = 4, 256


def end_run(ids: Sequence[int]) -> int:
    """Return where the one token repeated begins in which a text ends; its length if none does:
    at least two tokens, and half of the text."""
    start = len(ids)
    while start and ids[start - 1] == ids[-1]:
        start -= 1
    return start if len(ids) - start >= max(2, len(ids) / 2) else len(ids)


def finite_or_not(
    engine: GenerationEngine, texts: Sequence[Answered], context: JobContext
) -> dict[str, str]:
    """Return the detail of a row whose logits are not finite; all ranks must call this.

    Greedy choice among logits that are no numbers ends in one token repeated, so only such texts
    are read once more, untimed. Engines that give no logits cannot tell.
    """
    strange = []
    for text in texts:
        if (start := end_run(text.answer)) < len(text.answer):
            answer = text.answer[: min(start + 2, _TOKENS_LOOKED_AT)]
            strange.append(Answered(text.prompt, answer))
    gathered = context.collective.gather(strange[:_TEXTS_LOOKED_AT])
    looked_at = [text for part in gathered for text in part][:_TEXTS_LOOKED_AT]
    try:
        logits = list(engine.answer_logits(looked_at)) if looked_at else []
    except Exception as error:
        spared(error, context)
        return {}
    if not (broken := sum(not bool(one.isfinite().all()) for one in logits)):
        return {}
    of = f"{broken} of {len(looked_at)} texts that end in one token repeated"
    return {NOT_FINITE: f"its logits are infinite or no numbers in {of}"}


#: Number of answers read, from the dataset's start.
ANSWERS = 8


def answered(engine: GenerationEngine, examples: Sequence[Example]) -> list[Answered]:
    """The first examples with an answer that fit the model's positions."""
    texts = []
    for example in islice((one for one in examples if one.summary.strip()), ANSWERS):
        prompt = engine.encode(example.content, example.earlier)
        answer = engine.encode_answer(example.content, example.summary, example.earlier)
        limits = [limit for limit in (engine.context_length, engine.window) if limit is not None]
        if limits:
            answer = answer[: max(min(limits) - len(prompt), 0)]
        if answer:
            texts.append(Answered(tuple(prompt), tuple(answer)))
    return texts


def _answer_loss(
    engine: GenerationEngine, examples: Sequence[Example], context: JobContext
) -> Quality:
    import torch

    texts = answered(engine, examples)
    if not texts:
        why = "no example of the dataset has an answer with room"
        return Quality({}, {"answer_loss": f"not known: {why}"})
    summed = 0.0
    try:
        for text, logits in zip(texts, engine.answer_logits(texts), strict=True):
            labels = torch.tensor(text.answer)
            summed += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    except Exception as error:
        return Quality({}, {"answer_loss": f"not known: {spared(error, context)}"})
    tokens = sum(len(text.answer) for text in texts)
    said = f"of {tokens:,} tokens of {len(texts)} answers"
    return Quality({"answer_loss": summed / tokens}, {"answer_loss": said})


def run(request: Request, context: JobContext) -> Result:
    """Write the reference into the node's cache; see ``workloads.base.Workload``."""
    parameters = QualityReferenceParameters.model_validate(dict(request.parameters))
    context.device.seed(0)
    context.enter_phase("load")
    engine_loader: EngineLoader = engine_function(request.engine, "generate", context.device.name)
    resident, load_s = load_resident(request, context, engine_loader)
    engine = resident.engine
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts, tokens, logits, sample = continued(
        engine,
        request,
        context,
        dataset,
        prompts=parameters.prompts,
        output_tokens=parameters.output_tokens,
    )
    context.enter_phase("finish")
    directory = reference_directory(
        request.model, request.dataset, parameters.reading(), parameters
    )
    with file_lock(directory.with_name(f".{directory.name}.lock")):
        build_aside(directory, lambda to: save(to, prompts, tokens, logits), replace=True)
    return result_of(
        engine, dataset, sample, load_s=load_s, details={"quality_reference": str(directory)}
    )
