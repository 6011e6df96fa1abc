"""Loaded models that generate text: what all engines have in common.

A loaded model turns text into ids and back, makes a batch ready (padding, transfer to the card:
untimed) and generates greedily for it, calling back after each decoding step. What the tokens count
and how long they took is decided outside, the same way for every engine (``passes.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from workloads.base import Request, Unsupported
from workloads.data.shapes import Turn
from workloads.devices.base import Device
from workloads.models.loading import ModelSource
from workloads.models.precision import ModelWeights
from workloads.models.prompts import encode_answer, encode_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Output of one batch."""

    #: For each prompt the new ids in order; what follows an end-of-sequence id is padding.
    tokens: Sequence[Sequence[int]]
    computed_tokens: int  # positions the device worked on, padding included
    #: For each step the float32 logits [batch, vocabulary] on the host, where they were asked for.
    logits: Sequence[Any] = ()
    encoder_s: float | None = None  # of the whole time; None: the model has no encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Output of continuous batching, by prompt."""

    tokens: list[list[int]]  # up to and including the end of sequence
    computed_tokens: int  # positions the device worked on
    steps_apart: bool = True  # False: steps launched together, which have no times of their own


@dataclass(frozen=True, slots=True)
class Answered:
    """Ids of a prompt and of the answer that follows it, the token that ends it included."""

    prompt: Sequence[int]
    answer: Sequence[int]


#: Called with the indices of the texts that were admitted, or that got new tokens.
OnTexts: TypeAlias = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEngine(ABC):
    """One loaded model that generates text."""

    tokenizer: Any
    source: ModelSource
    weights: ModelWeights
    end_token_ids: frozenset[int]
    context_length: int | None  # most positions the model was made for; None: it does not say
    details: Mapping[str, str]  # for the row, e.g. the attention that really runs
    #: Most positions of a text where the model has a sliding window and the engine has none: up to
    #: there both see all that stands before. None: any number.
    window: int | None = None
    figures: Mapping[str, float] = field(default_factory=dict)  # of its engine's ``metrics``

    @property
    def random_weights(self) -> bool:
        """True if the weights were drawn, not trained."""
        return self.source.random_weights

    def encode(self, text: str, earlier: Sequence[Turn] = ()) -> list[int]:
        """Ids of one prompt, in the layout that the model was trained to answer."""
        return encode_prompt(self.tokenizer, self.source, text, earlier)

    def encode_answer(self, text: str, answer: str, earlier: Sequence[Turn] = ()) -> list[int]:
        """Ids of an answer as they follow those of its prompt, the one that ends it included."""
        return encode_answer(self.tokenizer, text, answer, earlier)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def padded_length(self, longest: int) -> int:
        """Tokens that each prompt of a batch has after padding, from those of its longest: with
        the number of prompts the shape that the engine computes with."""
        return longest

    @abstractmethod
    def prepare(self, prompts: Sequence[Sequence[int]]) -> Any:
        """A batch ready on the card, to be generated for as often as wanted."""

    @abstractmethod
    def generate(
        self,
        prepared: Any,
        *,
        output_tokens: int,
        ignore_eos: bool,
        on_step: Callable[[], None],
        keep_logits: bool = False,
    ) -> Callable[[], Generated]:
        """Generate greedily, up to ``output_tokens`` for each prompt, or exactly that many.

        ``on_step`` is called after each step, when the step's tokens are queued or done; or, where
        waiting for each would keep the card idle, after the first and at the end. The returned
        function fetches what came out, and is called when the clock has stopped.
        """

    def generate_continuously(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        slot_count: int,
        output_tokens: int,
        end_token_ids: Collection[int],
        on_admit: OnTexts,
        on_step: OnTexts,
    ) -> Completed:
        """Generate for all prompts, each as soon as one of so many places is free.

        Raises:
            Unsupported: the engine does not do that.
        """
        raise Unsupported("the engine of this job does not do continuous batching")

    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[Any]:
        """For each text the float32 logits [tokens of the answer, vocabulary] on the host, each
        from all that stands before its token: the answer is read, not chosen.

        Raises:
            Unsupported: the engine's library gives no logits.
        """
        raise Unsupported("this engine cannot return logits for a given text")


#: Loads a model onto a device in the precision of the request. It raises DataMissing where the
#: model is not there, Unsupported where the device lacks the precision or the attention, and
#: BadConfiguration where what was loaded is not what was asked for.
EngineLoader: TypeAlias = Callable[[Request, Device], GenerationEngine]


def computed(read: int, tokens: Sequence[Sequence[int]]) -> int:
    """Positions worked on, from those read: the last token of a text is not fed back."""
    return read + sum(max(len(ids) - 1, 0) for ids in tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """Prompts on their way through a library that decides itself how to step."""

    tokens: list[list[int]]  # of each prompt so far, up to and including its end
    add: Callable[[int], None]  # hands over a prompt, by its index
    #: Advances all; the texts that got tokens, and those that have ended.
    step: Callable[[], tuple[Sequence[int], Collection[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedEngine(GenerationEngine, ABC):
    """Base of engines whose library reads and writes, in each step, all texts that it was given.

    A text is handed over when there is a place for it. A static batch is the same with a place for
    every prompt. Nothing is padded.
    """

    @abstractmethod
    def begin(self, prepared: Any, output_tokens: int, ends: Collection[int]) -> Stepping:
        """Take these prompts, none of which is handed over yet."""

    def write(
        self,
        prepared: Any,
        *,
        places: int,
        output_tokens: int,
        ends: Collection[int],
        on_admit: OnTexts = lambda indices: None,
        on_step: OnTexts,
    ) -> list[list[int]]:
        """The tokens of each prompt up to and including its end; ``places`` texts at once."""
        texts = self.begin(prepared, output_tokens, ends)
        running: set[int] = set()
        waiting = 0
        while running or waiting < len(texts.tokens):
            new = range(waiting, min(len(texts.tokens), waiting + places - len(running)))
            waiting = new.stop
            if new:
                on_admit(new)
            for index in new:
                texts.add(index)
            running.update(new)
            fresh, ended = texts.step()
            if fresh:
                on_step(fresh)
            running.difference_update(ended)
        return texts.tokens

    def generate_continuously(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        slot_count: int,
        output_tokens: int,
        end_token_ids: Collection[int],
        on_admit: OnTexts,
        on_step: OnTexts,
    ) -> Completed:
        tokens = self.write(
            self.prepare(prompts),
            places=slot_count,
            output_tokens=output_tokens,
            ends=end_token_ids,
            on_admit=on_admit,
            on_step=on_step,
        )
        return Completed(tokens=tokens, computed_tokens=computed(sum(map(len, prompts)), tokens))
