"""A model that an engine has loaded, with what all engines have beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.base import Unsupported
from workloads.data.shapes import Turn
from workloads.engines.base import Answered
from workloads.models.loading import ModelSource
from workloads.models.precision import ModelWeights
from workloads.models.prompts import encode_answer, encode_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Base of the engines: see ``GenerationEngine`` for what its members mean."""

    tokenizer: Any
    source: ModelSource
    weights: ModelWeights
    end_token_ids: frozenset[int]
    context_length: int | None
    details: Mapping[str, str]
    window: int | None = None
    figures: Mapping[str, float] = field(default_factory=dict)  # of its engine's ``metrics``

    @property
    def random_weights(self) -> bool:
        return self.source.random_weights

    def encode(self, text: str, earlier: Sequence[Turn] = ()) -> list[int]:
        return encode_prompt(self.tokenizer, self.source, text, earlier)

    def encode_answer(self, text: str, answer: str, earlier: Sequence[Turn] = ()) -> list[int]:
        return encode_answer(self.tokenizer, text, answer, earlier)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def padded_length(self, longest: int) -> int:
        return longest

    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[Any]:
        raise Unsupported("the library of this engine tells no logits of a given text")
