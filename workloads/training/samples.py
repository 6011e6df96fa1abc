"""From examples to training samples: prompt, answer, and which tokens are to be learned.

A sample is the prompt in the layout in which the model is asked, then the answer and the token
that ends it. Only the answer is learned: its positions carry labels, the prompt's carry none. An
example without an answer is plain text, of which everything but the first token is learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from workloads.base import BadConfiguration
from workloads.models.prompt import encode_answer, encode_prompt

if TYPE_CHECKING:
    from workloads.data.examples import Example
    from workloads.models.loading import ModelSource

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
