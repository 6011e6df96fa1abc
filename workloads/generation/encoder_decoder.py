"""Generation with sequence-to-sequence models: the encoder reads once, the decoder writes.

Sources are padded on the right, as the model was trained; the decoder begins with one token of its
own. The encoder's pass is stamped where the library calls it, so its time and the decoder's stand
apart in every sample, whichever library generates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from workloads.api import Request
from workloads.data.examples import Example, Turn
from workloads.devices.base import Device
from workloads.engines.base import Generated
from workloads.errors import BadConfiguration
from workloads.generation.transformers_engine import Batch, TransformersEngine
from workloads.seq2seq_settings import source_length
from workloads.training.pairs import begin_token_id, source_text


def source_ids(
    tokenizer: Any, text: str, earlier: Sequence[Turn], prefix: str, longest: int
) -> list[int]:
    """Ids of a source with its prefix, cut so that the token which ends it stays."""
    whole = source_text(Example(content=text, earlier=tuple(earlier)), prefix)
    return list(tokenizer(whole, max_length=longest, truncation=True)["input_ids"])


def right_padded(prompts: Sequence[Sequence[int]], length: int, pad: int, card: str) -> Batch:
    """Sources on the card, each from the left."""
    ids = torch.full((len(prompts), length), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        mask[row, : len(prompt)] = 1
    return Batch(ids.to(card), mask.to(card))


@contextlib.contextmanager
def encoder_stamped(model: Any, device: Device) -> Iterator[list[tuple[Any, Any]]]:
    """Stamps before and after each pass of the model's encoder."""
    stamps: list[tuple[Any, Any]] = []
    began: list[Any] = []
    encoder = model.get_encoder()
    before = encoder.register_forward_pre_hook(lambda *_: began.append(device.stamp()))
    after = encoder.register_forward_hook(lambda *_: stamps.append((began.pop(), device.stamp())))
    try:
        yield stamps
    finally:
        before.remove()
        after.remove()


def generator(request: Request, positions: int | None, loaded: Mapping[str, Any]) -> Seq2SeqEngine:
    """The engine around a loaded model of transformers."""
    return Seq2SeqEngine(
        context_length=None,  # of source and text together there is no limit
        positions=positions,
        source_prefix=str(request.parameters.get("source_prefix") or ""),
        max_source_length=source_length(request.parameters),
        **loaded,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqEngine(TransformersEngine):
    """A sequence-to-sequence model in transformers, in evaluation mode, on its card."""

    source_prefix: str
    max_source_length: int
    positions: int | None  # of either side; None: the model has no limit

    def encode(self, text: str, earlier: Sequence[Turn] = ()) -> list[int]:
        return source_ids(self.tokenizer, text, earlier, self.source_prefix, self.max_source_length)

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Batch:
        longest = self.padded_length(max(len(prompt) for prompt in prompts))
        self._check(longest, "a source has")
        return right_padded(prompts, longest, self.pad_token_id, self.device.torch_device)

    def generate(
        self,
        prepared: Batch,
        *,
        output_tokens: int,
        ignore_eos: bool,
        on_step: Callable[[], None],
        keep_logits: bool = False,
    ) -> Callable[[], Generated]:
        self._check(output_tokens, "a text may have")
        with encoder_stamped(self.model, self.device) as stamps:
            fetch = TransformersEngine.generate(
                self,
                prepared,
                output_tokens=output_tokens,
                ignore_eos=ignore_eos,
                on_step=on_step,
                keep_logits=keep_logits,
            )

        def apart() -> Generated:
            found = fetch()
            return replace(
                found,
                # The decoder also reads the token that it begins with.
                computed_tokens=found.computed_tokens + len(found.tokens),
                encoder_s=self.device.seconds_in(stamps),
            )

        return apart

    def new_from(self, prompt_positions: int) -> int:
        return 1  # behind the token that the decoder begins with

    def generation_config(self, output_tokens: int, ignore_eos: bool) -> GenerationConfig:
        config = TransformersEngine.generation_config(self, output_tokens, ignore_eos)
        config.decoder_start_token_id = begin_token_id(self.model.config)
        return config

    def _check(self, tokens: int, what: str) -> None:
        if self.positions is not None and tokens > self.positions:
            raise BadConfiguration(
                f"{what} {tokens} tokens, and the model was made for {self.positions} positions on "
                "either side; lower max_source_length or output_tokens"
            )
