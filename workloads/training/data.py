"""From examples to training samples, and from samples to rows of tensors.

A sample is the prompt in the layout in which the model is asked, then the answer and the token
that ends it. Only the answer is learned: its positions carry labels, the prompt's carry none. An
example without an answer is plain text, of which everything but the first token is learned.

Samples are padded, or packed so that they share a row and do not meet: ``position_ids`` start at 0
again. transformers makes a mask of that for the attention of its newer models; others would let a
sample attend to its neighbour without a word, so ``check_packing`` tries it out on the very
model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from workloads.base import BadConfiguration, JobContext, Request, Unsupported
from workloads.data.datasets import Dataset, load_dataset
from workloads.data.shapes import Example
from workloads.models.prompts import encode_answer, encode_prompt

if TYPE_CHECKING:
    import torch

    from workloads.data.shapes import Example
    from workloads.devices.base import Device
    from workloads.models.loading import ModelSource
    from workloads.registry import TaskSpec
    from workloads.training.methods import MethodParameters
    from workloads.training.parallel.layout import Layout
    from workloads.training.technique import Inputs

#: The label of a position that is not learned, by convention of torch's cross entropy.
NOT_LEARNED = -100


class Learnable(Protocol):
    """A training sample of any task."""

    @property
    def tokens(self) -> int:
        """Number of its tokens, all that the model reads of it."""

    @property
    def learned_tokens(self) -> int:
        """Number of positions that have a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFormat:
    """All that decides how examples become samples, and samples tensors."""

    tokenizer: Any
    source: ModelSource
    config: Any  # the model's
    parameters: Mapping[str, Any]  # the workload's own
    pad_token_id: int
    context_length: int | None  # positions that the model was made for; None: it does not say

    @property
    def max_length(self) -> int:
        """Most tokens of a sample."""
        return int(self.parameters["max_length"])

    def check_length(self, setting: str, wanted: int) -> None:
        """Make sure that the model has positions for samples of this length.

        Raises:
            BadConfiguration: it has fewer.
        """
        room = self.context_length
        if room is not None and wanted > room:
            raise BadConfiguration(
                f"{setting} is {wanted}, the model was made for {room} positions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Samples in the order of the data, and what the row says of how they were made."""

    samples: Sequence[Learnable]
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingSample:
    """Ids of one sample; the first ``prompt_tokens`` of them are not learned."""

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
    made = encode_samples(examples, count, form.tokenizer, form.source, form.max_length)
    return Encoded(samples=made)


def encode_samples(
    examples: Sequence[Example],
    count: int,
    tokenizer: Any,
    source: ModelSource,
    max_length: int,
) -> list[TrainingSample]:
    """The first ``count`` examples as samples, from the start again where there are fewer."""
    made: dict[int, TrainingSample] = {}
    for position in range(count):
        index = position % len(examples)
        if index not in made:
            made[index] = _sample(examples[index], tokenizer, source, max_length)
    return [made[position % len(examples)] for position in range(count)]


def _sample(
    example: Example, tokenizer: Any, source: ModelSource, max_length: int
) -> TrainingSample:
    prompt = encode_prompt(tokenizer, source, example.content, example.earlier)
    if not example.summary:
        return TrainingSample(tuple(prompt[:max_length]), 1)
    answer = encode_answer(tokenizer, example.content, example.summary, example.earlier)
    prompt, answer = cut(prompt, answer, max_length)
    return TrainingSample((*prompt, *answer), len(prompt))


def cut(
    prompt: Sequence[int], answer: Sequence[int], max_length: int
) -> tuple[list[int], list[int]]:
    """Prompt and answer brought to ``max_length`` together, each cut at its end.

    The answer gives way first, down to half of the length; then the prompt.
    """
    room_for_answer = max(max_length - len(prompt), max_length // 2)
    answer = list(answer)[:room_for_answer]
    return list(prompt)[: max_length - len(answer)], answer


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


def in_order(samples: Sequence[Learnable], batch: int) -> list[list[int]]:
    """Batches of positions in the order of the data; the last is filled from the start."""
    return _in_batches(range(len(samples)), batch)


def uniform_length(samples: Sequence[Learnable], batch: int, window: int) -> list[list[int]]:
    """Batches of like length: sorted by length within windows of ``window`` batches each.

    The batches of a window come in a fixed order that is not by length, so that training does not
    drift from short to long.
    """
    batches = []
    for start in range(0, len(samples), batch * window):
        here = range(start, min(start + batch * window, len(samples)))
        by_length = sorted(here, key=lambda position: (samples[position].tokens, position))
        batches += _spread(_in_batches(by_length, batch))
    return batches


def _spread(batches: list[list[int]]) -> list[list[int]]:
    """A fixed order in which neighbours lie far apart: long strides through the list."""
    count = len(batches)
    stride = next(n for n in range(max(count * 5 // 8, 1), count + 2) if _coprime(n, count))
    return [batches[index * stride % count] for index in range(count)]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def _in_batches(positions: Sequence[int], batch: int) -> list[list[int]]:
    whole = -(-len(positions) // batch) * batch
    filled = [positions[index % len(positions)] for index in range(whole)]
    return [filled[start : start + batch] for start in range(0, whole, batch)]


def collate(samples: Sequence[TrainingSample], form: SampleFormat, fixed: bool = False) -> Inputs:
    """One sample a row, padded to the longest, or to ``max_length`` if that is ``fixed``."""
    return padded(samples, form.pad_token_id, form.max_length if fixed else None)


def pack(samples: Sequence[TrainingSample], form: SampleFormat, *, one_row: bool = False) -> Inputs:
    """Several samples a row, of at most ``max_length``; or all in ``one_row``, which pads nothing.

    How long that is matters to nobody who attends to each sample by itself: places start again.
    """
    length = sum(len(sample.ids) for sample in samples) if one_row else form.max_length
    return packed(samples, form.pad_token_id, length)


def padded(
    samples: Sequence[TrainingSample], pad_token_id: int, to_length: int | None = None
) -> Inputs:
    """One sample a row, filled up on the right to ``to_length``, else to the longest sample."""
    length = to_length or max(len(sample.ids) for sample in samples)
    return _inputs(
        ids=[_filled(sample.ids, length, pad_token_id) for sample in samples],
        labels=[_filled(sample.labels, length, NOT_LEARNED) for sample in samples],
        mask=[_filled([1] * len(sample.ids), length, 0) for sample in samples],
    )


def packed(samples: Sequence[TrainingSample], pad_token_id: int, max_length: int) -> Inputs:
    """As few rows as first-fit finds, of at most ``max_length``; filling is a sample of its own."""
    bins = first_fit([len(sample.ids) for sample in samples], max_length)
    length = max(sum(len(samples[index].ids) for index in held) for held in bins)
    ids, labels, positions = [], [], []
    for held in bins:
        row = [samples[index] for index in held]
        rest = length - sum(len(sample.ids) for sample in row)
        ids.append([*_chain(s.ids for s in row), *[pad_token_id] * rest])
        labels.append([*_chain(s.labels for s in row), *[NOT_LEARNED] * rest])
        positions.append([*_chain(range(len(s.ids)) for s in row), *range(rest)])
    return _inputs(ids=ids, labels=labels, positions=positions)


def longest_row(
    samples: Sequence[Learnable], batches: Sequence[Sequence[int]], cards: int, parts: int
) -> int:
    """Tokens of the longest row of all steps and cards, where a card cuts its share of a batch into
    so many parts, a row each."""
    longest = 0
    for batch in batches:
        for card in range(cards):
            tokens = [samples[index].tokens for index in batch[card::cards]]
            size = len(tokens) // parts
            rows = (sum(tokens[start : start + size]) for start in range(0, len(tokens), size))
            longest = max(longest, *rows)
    return longest


def filled_up(inputs: Inputs, length: int, pad_token_id: int) -> Inputs:
    """A row of packed samples with one more sample at its end, of which nothing is learned; one
    that is longer stays as it is, as a row of what is held out may be."""
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
    """Positions of ``lengths`` in bins of ``capacity``: the longest first, each into the first
    bin with room. A length beyond the capacity gets a bin of its own."""
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


def _chain(parts: Iterable[Iterable[int]]) -> list[int]:
    return [value for part in parts for value in part]


def _filled(values: Sequence[int], length: int, filling: int) -> list[int]:
    return [*values, *[filling] * (length - len(values))]


def _inputs(
    ids: list[list[int]],
    labels: list[list[int]],
    mask: list[list[int]] | None = None,
    positions: list[list[int]] | None = None,
) -> Inputs:
    import torch

    from workloads.training.technique import Inputs

    def tensor(values: list[list[int]] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.long)

    return Inputs(
        input_ids=torch.tensor(ids, dtype=torch.long),
        labels=torch.tensor(labels, dtype=torch.long),
        attention_mask=tensor(mask),
        position_ids=tensor(positions),
    )


def check_packing(model: Any, device: Device) -> None:
    """Make sure that packed samples do not attend to each other in this model.

    Raises:
        Unsupported: a sample's logits change with the sample before it.
    """
    import torch

    ids = torch.tensor([[3, 4, 5, 6, 7, 8], [8, 7, 9, 6, 7, 8]], device=device.torch_device)
    positions = torch.tensor([[0, 1, 2] * 2] * 2, device=device.torch_device)
    was_training = model.training
    model.eval()  # dropout would make a difference of its own
    with torch.no_grad():
        # One row at a time, so that both are computed in the same way.
        first, second = (
            model(
                input_ids=ids[row : row + 1],
                position_ids=positions[row : row + 1],
                use_cache=False,
            ).logits[:, 3:]
            for row in (0, 1)
        )
    model.train(was_training)
    if not torch.equal(first, second):
        raise Unsupported(
            f"{type(model).__name__} lets packed samples attend to each other: with position_ids "
            "alone it does not tell them apart; use another padding"
        )
