"""Loaded models: what all engines have in common, and libraries that step by themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workloads.base import Unsupported
from workloads.data.shapes import Turn
from workloads.engines.base import Answered, Completed
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


#: Is told which texts were handed over, or got new tokens.
Told = Callable[[Sequence[int]], None]


def in_places(
    texts: int,
    places: int,
    add: Callable[[int], None],
    step: Callable[[], tuple[Sequence[int], Collection[int]]],
    *,
    on_admit: Told,
    on_step: Told,
) -> None:
    """Hand over all texts, as many at once as there are places.

    Args:
        add: hands over a text, by its index.
        step: advances them all; the texts that got tokens, and those that have ended.
    """
    running: set[int] = set()
    waiting = 0
    while running or waiting < texts:
        new = range(waiting, min(texts, waiting + places - len(running)))
        waiting = new.stop
        if new:
            on_admit(new)
        for index in new:
            add(index)
        running.update(new)
        fresh, ended = step()
        if fresh:
            on_step(fresh)
        running.difference_update(ended)


def computed(read: int, tokens: Sequence[Sequence[int]]) -> int:
    """Positions worked on, from those read: the last token of a text is not fed back."""
    return read + sum(max(len(ids) - 1, 0) for ids in tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedEngine(LoadedModel, ABC):
    """Base of engines whose library reads and writes, in each step, all texts that it was given.

    A text is handed over when there is a place for it. A static batch is the same with a place for
    every prompt. Nothing is padded.
    """

    @abstractmethod
    def prepare(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        """A batch as the library takes it."""

    @abstractmethod
    def write(
        self,
        prepared: Sequence[Any],
        *,
        places: int,
        output_tokens: int,
        ends: Collection[int],
        on_admit: Told = lambda indices: None,
        on_step: Told,
    ) -> list[list[int]]:
        """The tokens of each prompt up to and including its end; ``places`` texts at once."""

    def generate_continuously(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        slot_count: int,
        output_tokens: int,
        end_token_ids: Collection[int],
        on_admit: Told,
        on_step: Told,
    ) -> Completed:
        """Generate for all prompts, each handed over when there is a place for it."""
        tokens = self.write(
            self.prepare(prompts),
            places=slot_count,
            output_tokens=output_tokens,
            ends=end_token_ids,
            on_admit=on_admit,
            on_step=on_step,
        )
        return Completed(tokens=tokens, computed_tokens=computed(sum(map(len, prompts)), tokens))
