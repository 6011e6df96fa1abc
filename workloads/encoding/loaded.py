"""An encoder that an engine has loaded, and its texts as ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.generation.encoder_decoder import right_padded
from workloads.generation.transformers_engine import Batch
from workloads.models.loading import ModelSource
from workloads.models.precision import ModelWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEncoder:
    """Base of encoders: see ``workloads.encoding.run.Encoder`` for what its members mean."""

    tokenizer: Any
    source: ModelSource
    weights: ModelWeights
    pad_token_id: int
    positions: int | None
    card: str  # where batches are wanted, as torch calls it
    details: Mapping[str, str]
    figures: Mapping[str, float] = field(default_factory=dict)  # of its engine's ``metrics``

    @property
    def random_weights(self) -> bool:
        return self.source.random_weights

    def ids(self, text: str, max_length: int) -> list[int]:
        most = min(max_length, self.positions or max_length)
        return list(self.tokenizer(text, max_length=most, truncation=True)["input_ids"])

    def prepare(self, texts: Sequence[Sequence[int]]) -> Batch:
        return right_padded(texts, max(map(len, texts)), self.pad_token_id, self.card)
