"""Samples of a dataset, tokenized: those that a job trains on, and those that it holds out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from workloads.base import BadConfiguration, JobContext, Request
from workloads.data.catalog import Dataset, load_dataset
from workloads.data.examples import Example
from workloads.finetuning_method import MethodParameters
from workloads.parallel.layout import Layout
from workloads.registry import TaskSpec
from workloads.training.samples import Encoded, Learnable, SampleFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSamples:
    """Samples of a dataset, and how long tokenizing those took that are trained on."""

    encoded: Encoded
    held_out: Sequence[Learnable]
    tokenization_s: float
    dataset: Dataset


def read_samples(
    request: Request,
    context: JobContext,
    method: MethodParameters,
    task: TaskSpec,
    form: SampleFormat,
    layout: Layout,
) -> ReadSamples:
    """The samples to train on, and those that are held out."""
    dataset = load_dataset(request.dataset, method.reading())
    count = max(method.samples, request.batch_size * layout.data_size)
    examples, held = split(dataset.examples, method.held_out, request.dataset)
    encode = task.function("encode")
    began = context.clock()
    encoded: Encoded = encode(examples, count, form)
    at_once = request.batch_size * layout.data_size
    if len(encoded.samples) < at_once and not request.probe:
        raise BadConfiguration(
            f"{request.dataset} gives {len(encoded.samples)} samples, and one step takes {at_once} "
            f"(batch_size {request.batch_size} on {layout.data_size} cards)"
        )
    if request.probe:  # the longest samples decide whether a batch fits
        longest = sorted(encoded.samples, key=lambda sample: -sample.tokens)
        encoded = dataclasses.replace(encoded, samples=longest[:at_once])
    return ReadSamples(
        encoded=encoded,
        tokenization_s=context.clock() - began,
        held_out=encode(held, len(held), form).samples if held else (),
        dataset=dataset,
    )


def split(
    examples: Sequence[Example], count: int, name: str
) -> tuple[Sequence[Example], Sequence[Example]]:
    """The examples that are trained on, and the last ``count`` of them, which are not.

    Raises:
        BadConfiguration: none are left to train on.
    """
    if count >= len(examples):
        raise BadConfiguration(
            f"held_out is {count:,}, and {name} has {len(examples):,} examples; at least one is "
            "needed to train on"
        )
    at = len(examples) - count
    return examples[:at], examples[at:]
