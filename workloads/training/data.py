"""Training samples from examples, and tensors from samples.

A sample is the prompt in the model's layout, the answer and the end token; only the answer and end
token have labels. Plain text without an answer is learned except for its first token.

Samples are padded, or packed into rows where ``position_ids`` restart at 0. Newer models of
transformers derive a mask from that; in others samples would silently attend to their neighbours,
so ``check_packing`` tests the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from workloads.base import NOT_RENDERED, BadConfiguration, JobContext, Request, Unsupported
from workloads.data.datasets import Dataset, load_dataset, unnamed
from workloads.models.prompts import NotRendered, encode_answer, encode_prompt

if TYPE_CHECKING:
    import torch

    from workloads.data.shapes import Example
    from workloads.devices.base import Device
    from workloads.models.loading import ModelSource
    from workloads.registry import TaskSpec
    from workloads.training.methods import MethodParameters
    from workloads.training.parallel.layout import Layout
    from workloads.training.technique import Inputs

Item = TypeVar("Item")

#: The label of a position that is not learned, by convention of torch's cross entropy.
NOT_LEARNED = -100


class Learnable(Protocol):
    """A training sample of any task."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the model reads."""

    @property
    def learned_tokens(self) -> int:
        """Number of positions that have a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFormat:
    """Settings for turning examples into samples and samples into tensors."""

    tokenizer: Any
    source: ModelSource
    config: Any  # the model's
    parameters: Mapping[str, Any]  # the workload's own
    pad_token_id: int
    context_length: int | None  # positions of the model; None: not declared

    @property
    def max_length(self) -> int:
        """Most tokens of a sample."""
        return int(self.parameters["max_length"])

    def check_length(self, setting: str, wanted: int) -> None:
        """Raise BadConfiguration if the model has too few positions."""
        room = self.context_length
        if room is not None and wanted > room:
            raise BadConfiguration(
                f"{setting} is {wanted}, the model was made for {room} positions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Samples in the order of the data, and details for the row."""

    samples: Sequence[Learnable]
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingSample:
    """Ids of one sample; the first ``prompt_tokens`` are not learned."""

    ids: tuple[int, ...]
    prompt_tokens: int  # at least 1: nothing predicts the first token

    @cached_property
    def labels(self) -> list[int]:
        """One label a position, not shifted."""
        return [NOT_LEARNED] * self.prompt_tokens + list(self.ids[self.prompt_tokens :])

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return len(self.ids)

    @property
    def learned_tokens(self) -> int:
        """Number of positions that have a label."""
        return len(self.ids) - self.prompt_tokens


def encode(examples: Sequence[Example], count: int, form: SampleFormat) -> Encoded:
    """The first ``count`` examples as samples of a causal language model."""
    form.check_length("max_length", form.max_length)
    return encode_samples(examples, count, form.tokenizer, form.source, form.max_length)


def encode_samples(
    examples: Sequence[Example],
    count: int,
    tokenizer: Any,
    source: ModelSource,
    max_length: int,
) -> Encoded:
    """The first ``count`` examples as samples, repeated cyclically if there are fewer.

    Those that the chat template refuses are left out and counted; if they are more than half, the
    first refusal is raised.
    """
    samples: list[TrainingSample] = []
    refused: list[NotRendered] = []
    for example in examples:
        if len(samples) == count:
            break
        try:
            prompt = encode_prompt(tokenizer, source, example.content, example.earlier)
            answer = (
                encode_answer(tokenizer, example.content, example.summary, example.earlier)
                if example.summary
                else []
            )
        except NotRendered as error:
            refused.append(error)
            continue
        if answer:
            prompt, answer = cut(prompt, answer, max_length)
            samples.append(TrainingSample((*prompt, *answer), len(prompt)))
        else:
            samples.append(TrainingSample(tuple(prompt[:max_length]), 1))
    if len(refused) > len(samples):
        raise refused[0]
    details = {}
    if refused:
        details[NOT_RENDERED] = f"{len(refused):,} examples are left out; first: {refused[0]}"
    repeated = [samples[index % len(samples)] for index in range(count)]
    return Encoded(samples=repeated, details=details)


def cut(
    prompt: Sequence[int], answer: Sequence[int], max_length: int
) -> tuple[list[int], list[int]]:
    """Cut the answer's end, down to half of ``max_length``, then the prompt's."""
    room_for_answer = max(max_length - len(prompt), max_length // 2)
    answer = list(answer)[:room_for_answer]
    return list(prompt)[: max_length - len(answer)], answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSamples:
    """Samples of a dataset, and the tokenization time of the training samples."""

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
    """Read training and held-out samples."""
    dataset = load_dataset(request.dataset, method.reading())
    if dataset.unnamed:
        raise BadConfiguration(unnamed(request.dataset, dataset.unnamed))
    at_once = request.batch_size * layout.data_size
    examples, held_out = split(dataset.examples, method.held_out, request.dataset)
    encode = task.function("encode")
    began = context.clock()
    encoded: Encoded = encode(examples, max(method.samples, at_once), form)
    if len(encoded.samples) < at_once and not request.probe:
        raise BadConfiguration(
            f"{request.dataset} gives {len(encoded.samples)} samples, and one step takes {at_once} "
            f"(batch_size {request.batch_size} on {layout.data_size} cards)"
        )
    if request.probe:  # the longest samples decide whether a batch fits
        longest = sorted(encoded.samples, key=lambda sample: -sample.tokens)
        encoded = replace(encoded, samples=longest[:at_once])
    return ReadSamples(
        encoded=encoded,
        tokenization_s=context.clock() - began,
        held_out=encode(held_out, len(held_out), form).samples if held_out else (),
        dataset=dataset,
    )


def split(
    examples: Sequence[Example], count: int, name: str
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Split off the last ``count`` examples; at least one must remain for training."""
    if count >= len(examples):
        raise BadConfiguration(
            f"held_out is {count:,}, and {name} has {len(examples):,} examples; at least one is "
            "needed to train on"
        )
    at = len(examples) - count
    return examples[:at], examples[at:]


def in_order(samples: Sequence[Learnable], batch: int) -> list[list[int]]:
    """Batches of positions in the order of the data; the last is filled from the start."""
    return _in_batches(range(len(samples)), batch)


def uniform_length(samples: Sequence[Learnable], batch: int, window: int) -> list[list[int]]:
    """Batches sorted by length within windows of ``window`` batches, in a fixed mixed order."""
    batches = []
    for start in range(0, len(samples), batch * window):
        here = range(start, min(start + batch * window, len(samples)))
        by_length = sorted(here, key=lambda position: (samples[position].tokens, position))
        alike = _in_batches(by_length, batch)
        # In long strides, so that neighbours (of like length) end up far apart.
        count = len(alike)
        strides = range(max(count * 5 // 8, 1), count + 2)
        stride = next(number for number in strides if math.gcd(number, count) == 1)
        batches += [alike[index * stride % count] for index in range(count)]
    return batches


def _in_batches(positions: Sequence[int], batch: int) -> list[list[int]]:
    whole = -(-len(positions) // batch) * batch
    filled = [positions[index % len(positions)] for index in range(whole)]
    return [filled[start : start + batch] for start in range(0, whole, batch)]


def collate(samples: Sequence[TrainingSample], form: SampleFormat, fixed: bool = False) -> Inputs:
    """One sample a row, padded to the longest, or to ``max_length`` if ``fixed``."""
    return padded(samples, form.pad_token_id, form.max_length if fixed else None)


def padded(
    samples: Sequence[TrainingSample], pad_token_id: int, to_length: int | None = None
) -> Inputs:
    """One sample a row, filled up on the right to ``to_length``, else to the longest sample."""
    from workloads.training.technique import Inputs

    length = to_length or max(len(sample.ids) for sample in samples)
    return Inputs(
        input_ids=rows_of([sample.ids for sample in samples], length, pad_token_id),
        labels=rows_of([sample.labels for sample in samples], length, NOT_LEARNED),
        attention_mask=rows_of([[1] * len(sample.ids) for sample in samples], length, 0),
    )


def rows_of(values: Sequence[Sequence[int]], length: int, filling: int) -> torch.Tensor:
    """A tensor [rows, length] of lists, each filled up on the right."""
    import torch

    rows = [[*row, *[filling] * (length - len(row))] for row in values]
    return torch.tensor(rows, dtype=torch.long)


def pack(samples: Sequence[TrainingSample], form: SampleFormat, *, one_row: bool = False) -> Inputs:
    """Pack samples first-fit into rows of at most ``max_length``, or all into ``one_row`` unpadded.

    Padding is a sample of its own.
    """
    from workloads.training.technique import Inputs

    lengths = [len(sample.ids) for sample in samples]
    bins = first_fit(lengths, sum(lengths) if one_row else form.max_length)
    rows = [[samples[index] for index in indices] for indices in bins]
    length = max(sum(len(sample.ids) for sample in row) for row in rows)
    ids = [[*chain.from_iterable(sample.ids for sample in row)] for row in rows]
    labels = [[*chain.from_iterable(sample.labels for sample in row)] for row in rows]
    places = [[*chain.from_iterable(range(len(sample.ids)) for sample in row)] for row in rows]
    for row in places:
        row.extend(range(length - len(row)))
    return Inputs(
        input_ids=rows_of(ids, length, form.pad_token_id),
        labels=rows_of(labels, length, NOT_LEARNED),
        position_ids=rows_of(places, length, 0),
    )


def shared_out(batch: Sequence[Item], card: int, cards: int, parts: int) -> list[Sequence[Item]]:
    """One card's share of a global batch, cut into ``parts`` micro-batches."""
    mine = batch[card::cards]
    size = len(mine) // parts
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def filled_up(inputs: Inputs, length: int, pad_token_id: int) -> Inputs:
    """Fill a packed row up with an unlearned sample; longer rows (held-out ones) stay as is."""
    import torch
    from torch.nn.functional import pad

    assert inputs.position_ids is not None
    rest = max(0, length - inputs.input_ids.shape[1])
    places = torch.arange(rest).expand(len(inputs.position_ids), -1)
    return replace(
        inputs,
        input_ids=pad(inputs.input_ids, (0, rest), value=pad_token_id),
        labels=pad(inputs.labels, (0, rest), value=NOT_LEARNED),
        position_ids=torch.cat([inputs.position_ids, places], 1),
    )


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions of ``lengths`` in bins by first-fit decreasing; too long ones get their own bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = next((n for n, free in enumerate(room) if free >= lengths[index]), None)
        if fitting is None:
            bins.append([])
            room.append(capacity)
            fitting = len(bins) - 1
        bins[fitting].append(index)
        room[fitting] -= lengths[index]
    return bins


def check_packing(model: Any, device: Device) -> None:
    """Raise Unsupported if a sample's logits depend on the sample before it in its row."""
    import torch

    ids = torch.tensor([[3, 4, 5, 6, 7, 8], [8, 7, 9, 6, 7, 8]], device=device.torch_device)
    positions = torch.tensor([[0, 1, 2] * 2] * 2, device=device.torch_device)
    was_training = model.training
    model.eval()  # dropout would make a difference of its own
    with torch.no_grad():
        # Both in the same way: in two equal rows, since some attention packs single rows only.
        first, second = (
            model(input_ids=ids[[row, row]], position_ids=positions, use_cache=False).logits[:, 3:]
            for row in (0, 1)
        )
    model.train(was_training)
    if not torch.equal(first, second):
        raise Unsupported(
            f"{type(model).__name__} lets packed samples attend to each other: with position_ids "
            "alone it does not tell them apart; use another padding"
        )
