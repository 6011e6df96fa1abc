"""Interface of loaded models that generate text; ``passes.py`` counts and times their tokens."""

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

#: Called with the indices of admitted texts, or of those with new tokens.
OnTexts: TypeAlias = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Greedy generation for one batch."""

    output_tokens: int  # most for each prompt; exactly that many without ``ends``
    ends: Collection[int] = ()  # ids that end a text
    #: Called after each step, or only after the first and at the end where waiting would idle the
    #: card.
    on_step: Callable[[], None] = lambda: None
    keep_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousGeneration:
    """Greedy generation for prompts of which each begins as soon as a slot is free."""

    slots: int
    output_tokens: int
    ends: Collection[int] = ()
    on_admit: OnTexts = lambda indices: None
    on_step: OnTexts = lambda indices: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Output of one batch, or of continuous batching."""

    #: New ids of each prompt; padded after an end of sequence, in continuous batching up to it.
    tokens: Sequence[Sequence[int]]
    computed_tokens: int  # positions the device worked on, padding included
    #: By step, float32 [batch, vocabulary] on the host, if requested.
    logits: Sequence[Any] = ()
    encoder_s: float | None = None  # part of the whole time; None: no encoder
    steps_apart: bool = True  # False: some steps were launched together, so have no own times


@dataclass(frozen=True, slots=True)
class Answered:
    """Ids of a prompt and of its answer, end token included."""

    prompt: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ABC):
    """One loaded model that reads text."""

    tokenizer: Any
    source: ModelSource
    weights: ModelWeights
    details: Mapping[str, str]  # for the row, e.g. the attention that really runs
    figures: Mapping[str, float] = field(default_factory=dict)  # of its engine's ``metrics``

    @property
    def random_weights(self) -> bool:
        """True if the weights are random."""
        return self.source.random_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEngine(LoadedModel, ABC):
    """One loaded model that generates text."""

    end_token_ids: frozenset[int]
    context_length: int | None  # the model's most positions; None: unknown
    #: Most positions of a text if the model has a sliding window that the engine lacks.
    window: int | None = None

    def encode(self, text: str, earlier: Sequence[Turn] = ()) -> list[int]:
        """Ids of one prompt, in the layout that the model was trained to answer."""
        return encode_prompt(self.tokenizer, self.source, text, earlier)

    def encode_answer(self, text: str, answer: str, earlier: Sequence[Turn] = ()) -> list[int]:
        """Ids of an answer to a prompt, end token included."""
        return encode_answer(self.tokenizer, text, answer, earlier)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def padded_length(self, longest: int) -> int:
        """Tokens of each prompt after padding, by the batch's longest."""
        return longest

    @abstractmethod
    def prepare(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Pad a batch and copy it to the card, untimed; reusable."""

    @abstractmethod
    def generate(self, prepared: Any, generation: Generation) -> Callable[[], Generated]:
        """Generate; the returned function fetches the output, when the clock has stopped."""

    def generate_continuously(
        self, prompts: Sequence[Sequence[int]], generation: ContinuousGeneration
    ) -> Generated:
        """Generate for all prompts; Unsupported without continuous batching."""
        raise Unsupported("the engine of this job does not do continuous batching")

    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[Any]:
        """For each text, float32 logits [answer tokens, vocabulary] on the host (teacher forcing);
        Unsupported if the engine's library gives none."""
        raise Unsupported("this engine cannot return logits for a given text")


#: Loads a model in the request's precision. Raises DataMissing (no model), Unsupported (precision
#: or attention on this device) and BadConfiguration (loaded in another format).
EngineLoader: TypeAlias = Callable[[Request, Device], GenerationEngine]


def computed(read: int, tokens: Sequence[Sequence[int]]) -> int:
    """Computed positions: prompts (``read``) and all tokens but the last, which is not fed back."""
    return read + sum(max(len(ids) - 1, 0) for ids in tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """Generation in a library that schedules its own steps."""

    tokens: list[list[int]]  # of each prompt so far, up to and including its end
    add: Callable[[int], None]  # submits a prompt, by index
    #: Does a step; returns texts with new tokens, and ended texts.
    step: Callable[[], tuple[Sequence[int], Collection[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedEngine(GenerationEngine, ABC):
    """Base of engines whose library steps through all submitted texts, without padding. A text is
    submitted when a slot is free; a static batch has a slot for every prompt."""

    @abstractmethod
    def begin(self, prepared: Any, output_tokens: int, ends: Collection[int]) -> Stepping:
        """Set up generation for prompts, without submitting any."""

    def write(self, prepared: Any, generation: ContinuousGeneration) -> list[list[int]]:
        """Generate for prepared prompts; tokens up to and including each end."""
        texts = self.begin(prepared, generation.output_tokens, generation.ends)
        running: set[int] = set()
        waiting = 0
        while running or waiting < len(texts.tokens):
            free = generation.slots - len(running)
            new = range(waiting, min(len(texts.tokens), waiting + free))
            waiting = new.stop
            if new:
                generation.on_admit(new)
            for index in new:
                texts.add(index)
            running.update(new)
            fresh, ended = texts.step()
            if fresh:
                generation.on_step(fresh)
            running.difference_update(ended)
        return texts.tokens

    def write_together(
        self, prepared: Sequence[Any], generation: Generation, on_step: OnTexts
    ) -> list[list[int]]:
        """``write`` for a static batch, which has a slot for every prompt."""
        slots, most, ends = len(prepared), generation.output_tokens, generation.ends
        every = ContinuousGeneration(slots=slots, output_tokens=most, ends=ends, on_step=on_step)
        return self.write(prepared, every)

    def generate_continuously(
        self, prompts: Sequence[Sequence[int]], generation: ContinuousGeneration
    ) -> Generated:
        tokens = self.write(self.prepare(prompts), generation)
        return Generated(tokens=tokens, computed_tokens=computed(sum(map(len, prompts)), tokens))
