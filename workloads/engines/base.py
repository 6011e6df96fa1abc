"""What text generation asks of an engine, whichever library it is.

An engine holds one loaded model. It turns text into ids and back, makes a batch ready (padding,
transfer to the card: untimed), and generates greedily for it, telling after each decoding step
that one is done. What the tokens count and how long they took is decided outside, the same way
for every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workloads.api import Request
from workloads.devices.base import Device
from workloads.weights import ModelWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What came out of one batch."""

    #: For each prompt the new ids in order; what follows an end-of-sequence id is padding.
    tokens: Sequence[Sequence[int]]
    computed_tokens: int  # positions the device worked on, padding included
    #: For each step the float32 logits [batch, vocabulary] on the host, where they were asked for.
    logits: Sequence[Any] = ()


class GenerationEngine(Protocol):
    """One loaded model."""

    @property
    def weights(self) -> ModelWeights:
        """Bytes, count and format of the loaded weights."""

    @property
    def random_weights(self) -> bool:
        """Whether the weights were drawn, not trained."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The ids that end a text."""

    @property
    def context_length(self) -> int | None:
        """Most positions the model was made for; None if it does not say."""

    @property
    def details(self) -> Mapping[str, str]:
        """What else is worth a column, e.g. the attention that really runs."""

    def encode(self, text: str) -> list[int]:
        """Ids of one prompt, in the layout that the model was trained to answer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, without special tokens."""

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Any:
        """A batch ready on the card, to be generated for as often as wanted."""

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


class EngineLoader(Protocol):
    """Loads a model onto a device in the precision that the request asks for."""

    def __call__(self, request: Request, device: Device) -> GenerationEngine:
        """Load.

        Raises:
            DataMissing: the model is not there.
            Unsupported: the precision or the attention cannot be had on this device.
            BadConfiguration: what was loaded is not what was asked for.
        """
