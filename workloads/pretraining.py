"""Pretraining of a masked language model on a corpus, from fresh weights or a checkpoint.

Chunks have one length, so padding and packing do not apply. The rules read local files of model and
corpus without torch; anything unavailable to the plan is checked when the job encodes the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from workloads.base import SAMPLES, JobDescription, Metric, Refusal, Timed, WorkloadError
from workloads.data.datasets import Reading, changed_at, find_dataset, load_examples, reading_of
from workloads.data.shapes import text_of
from workloads.engines import trains_by_library
from workloads.finetuning import TRAINED_IN, half_weights
from workloads.inspection.checkpoints import UnusableFile, read_object, weight_files
from workloads.inspection.tokenizers import fast_tokenizer
from workloads.models.catalog import MADE, find_model, known_config, usable_positions
from workloads.models.embedded import FILES
from workloads.registry import WorkChange, WorkloadSpec
from workloads.settings import work
from workloads.training.methods import TrainingParameters
from workloads.training.parallel.layout import model_parallel_size, pipeline_size
from workloads.training.techniques import technique_refusals, with_techniques

#: Corpora with this many bytes per wanted token are not read in a plan; English has 4 or 5.
_BYTES_PER_TOKEN = 16


def refuse(job: JobDescription) -> tuple[Refusal, ...]:
    """Objections to a job beyond those of its engine and kind of model."""
    return (*_precision(job), *_model(job), *_chunks(job), *technique_refusals(job))


def _precision(job: JobDescription) -> Iterator[Refusal]:
    if job.precision not in TRAINED_IN:
        yield Refusal(
            setting="precision",
            reason=f"weights in {job.precision} have no gradients",
            hint="write precision: fp32 with autocast: bf16, or precision: bf16",
            unsupported=True,
        )
    elif job.precision == "fp16":
        yield half_weights("pretraining")


def _model(job: JobDescription) -> Iterator[Refusal]:
    directory, config = _files(job.model)
    if directory is not None and job.parameters["initial_weights"] == "checkpoint":
        try:
            weight_files(directory)
        except WorkloadError as error:
            yield Refusal(
                setting="initial_weights", reason=str(error), hint="write initial_weights: fresh"
            )
    room = usable_positions(config) if config is not None else None
    length = job.parameters["max_length"]
    if room is not None and length > room:
        yield Refusal(
            setting="max_length",
            reason=f"chunks of {length} tokens, and {job.model} was made for {room} positions",
            hint=f"write max_length: {room}, or less",
        )
    if pipeline_size(job.parameters, job.cards) > 1:
        yield Refusal(
            setting="strategy",
            reason="this version cuts decoders into stages, and masked words are predicted by an "
            "encoder",
            hint="write strategy: ddp or fsdp2",
            unsupported=True,
        )
    if directory is not None and _mask_token(directory) == "":
        yield Refusal(
            setting="model",
            reason=f"the tokenizer in {directory} has no mask token, which masked words are shown "
            "as",
            hint="take the tokenizer of a masked language model, such as BERT's",
        )


def _mask_token(directory: Path) -> str | None:
    """Return the mask token in a tokenizer's files, "" if they name none; None without files."""
    found = None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            values = read_object(directory / name)
        except UnusableFile:
            values = {}
        if values is not None and not found:
            token = values.get("mask_token")
            found = str((token.get("content") if isinstance(token, dict) else token) or "")
    return found


def _chunks(job: JobDescription) -> Iterator[Refusal]:
    if not isinstance(job.batch_size, int):
        return  # searched for; too large a batch ends its trial
    wanted = job.batch_size * job.cards // model_parallel_size(job.parameters, job.cards)
    length = job.parameters["max_length"]
    there = _counted(job, wanted)
    if there is not None and there < wanted:
        yield Refusal(
            setting="dataset",
            reason=f"{job.dataset} makes {there} chunks of {length} tokens, and one batch on "
            f"{job.cards} card{'s' if job.cards > 1 else ''} takes {wanted}",
            hint="take more text, a smaller batch_size or a smaller max_length",
        )


def _files(model: str) -> tuple[Path | None, Any]:
    """Directory and configuration of a model, each None if not available locally."""
    try:
        directory = Path(find_model(model, weights=False).location)
    except (WorkloadError, OSError):
        return None, None  # the job's own load says so
    return directory if directory.is_dir() else None, known_config(model)


def _counted(job: JobDescription, wanted: int) -> int | None:
    """Chunks of the corpus, counted up to ``wanted``; None if unknown or surely enough."""
    parameters, dataset = job.parameters, job.dataset
    reading = reading_of(job)
    length = int(parameters["max_length"])
    try:
        entry = find_dataset(dataset)
        if entry.kind == "hub":
            return None
        if (path := entry.path) is not None:
            files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
            if sum(file.stat().st_size for file in files) > wanted * length * _BYTES_PER_TOKEN:
                return None
        tokens = _tokens(job.model, dataset, reading, wanted * length, changed_at(dataset))
    except (WorkloadError, OSError):
        return None  # reading it says so
    return None if tokens is None else tokens // length


@lru_cache(maxsize=64)  # jobs of a grid share a corpus
def _tokens(
    model: str, dataset: str, reading: Reading, wanted: int, _changed_at_ns: int
) -> int | None:
    """Number of tokens of a corpus, counted up to ``wanted``; None without a tokenizer."""
    directory = FILES / model if model in MADE else _files(model)[0]
    if directory is None or (tokenizer := fast_tokenizer(directory)) is None:
        return None
    tokens = 0
    for example in load_examples(dataset, reading):
        if tokens >= wanted:
            break
        tokens += len(tokenizer.encode(text_of(example)).ids)
    return tokens


TASKS = ("masked-lm",)


class CorpusParameters(TrainingParameters):
    """Settings of pretraining on a corpus."""

    initial_weights: Literal["fresh", "checkpoint"] = work(
        "fresh",
        loads=True,
        description="fresh draws the weights of the model's configuration, whether or not it has "
        "any; checkpoint goes on with those it has.",
    )
    masked_share: float = work(
        0.15,
        gt=0,
        lt=1,
        description="Probability with which a token is masked and learned: 80 % of them are shown "
        "as the mask token, 10 % as any token, 10 % as they are, drawn anew in every step.",
    )


PretrainingParameters = with_techniques(
    "PretrainingParameters",
    CorpusParameters,
    TASKS,
    {"learning_rate_schedule": "linear", "max_gradient_norm": 1.0},
)


def _steps_per_s(timed: Timed) -> float | None:
    """Optimizer steps per second, each taking as long as its slowest rank."""
    slowest: dict[tuple[int, int], float] = {}
    for sample in timed.samples:
        step = (sample.repeat, sample.batch)
        slowest[step] = max(slowest.get(step, 0.0), sample.wall_s)
    took_s = sum(slowest.values())
    return len(slowest) / took_s if took_s > 0 else None


def _hours(steps: int) -> Metric:

    def figure(timed: Timed) -> float | None:
        rate = _steps_per_s(timed)
        return steps / rate / 3600 if rate else None

    return Metric(
        name=f"hours_for_{steps}_steps",
        title=f"{steps:,} steps",
        unit="h",
        description=f"Time for {steps:,} steps at the rate that was measured, as others trained.",
        better="lower",
        figure=figure,
    )


SPEC = WorkloadSpec(
    name="pretraining",
    function="workloads.finetuning:run",
    parameters=PretrainingParameters,
    summary="Pretraining of a masked language model on chunks of a corpus: samples/s, loss.",
    ability="train",
    tasks=TASKS,
    dataset="english-corpus-synthetic",
    fresh_weights=True,
    throughput=SAMPLES,
    metrics=(
        Metric(
            name="steps_per_s",
            title="steps",
            unit="steps/s",
            description="Optimizer steps over their time.",
            better="higher",
            figure=_steps_per_s,
        ),
        _hours(65_000),
        _hours(20_000),
    ),
    work_changes=(
        WorkChange(
            what="optimum-habana clips nothing where max_gradient_norm is null",
            concerns=lambda engine, given: (
                trains_by_library(engine) and given.get("max_gradient_norm", 1.0) is None
            ),
        ),
    ),
    refuse=refuse,
)
