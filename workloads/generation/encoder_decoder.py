"""Generation with sequence-to-sequence models: the encoder reads once, the decoder writes.

Sources are padded on the right, as the model was trained; the decoder begins with one token of its
own. The encoder's pass is timed where the library calls it, so its time and the decoder's stand
apart in every sample, whichever library generates.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from workloads.base import BadConfiguration, Request
from workloads.data.shapes import Example, Turn
from workloads.devices.base import Device
from workloads.engines.base import Answered, Generated
from workloads.generation.transformers_engine import Batch, TransformersEngine
from workloads.training.pairs import TARGET_TOKENS, begin_token_id, source_length, source_text


def right_padded(prompts: Sequence[Sequence[int]], length: int, pad: int, card: str) -> Batch:
    """Sources on the card, each from the left."""
    ids = torch.full((len(prompts), length), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        mask[row, : len(prompt)] = 1
    return Batch(ids.to(card), mask.to(card))


@contextlib.contextmanager
def encoder_timed(model: Any, device: Device) -> Iterator[list[float]]:
    """Seconds of each pass of the model's encoder. The card is waited for on either side of it, as
    it is after every step."""
    took: list[float] = []
    began: list[float] = []

    def start(*_: Any) -> None:
        device.synchronize()
        began.append(time.perf_counter())

    def stop(*_: Any) -> None:
        device.mark_step()
        device.synchronize()
        took.append(time.perf_counter() - began.pop())

    encoder = model.get_encoder()
    hooks = (encoder.register_forward_pre_hook(start), encoder.register_forward_hook(stop))
    try:
        yield took
    finally:
        for hook in hooks:
            hook.remove()


class SourceReader:
    """Part of an engine whose models read a source by an encoder."""

    __slots__ = ()

    model: Any
    tokenizer: Any
    device: Device
    pad_token_id: int
    source_prefix: str
    max_source_length: int
    positions: int | None  # of either side; None: the model has no limit

    def encode(self, text: str, earlier: Sequence[Turn] = ()) -> list[int]:
        whole = source_text(Example(content=text, earlier=tuple(earlier)), self.source_prefix)
        cut = {"max_length": self.max_source_length, "truncation": True}
        return list(self.tokenizer(whole, **cut)["input_ids"])

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Batch:
        longest: int = self.padded_length(max(map(len, prompts)))  # type: ignore[attr-defined]
        self._check(longest, "a source has")
        return right_padded(prompts, longest, self.pad_token_id, self.device.torch_device)

    def generate(
        self, prepared: Batch, *, output_tokens: int, **more: Any
    ) -> Callable[[], Generated]:
        self._check(output_tokens, "a text may have")
        with encoder_timed(self.model, self.device) as took:
            fetch = super().generate(  # type: ignore[misc]
                prepared, output_tokens=output_tokens, **more
            )

        def apart() -> Generated:
            found: Generated = fetch()
            # The decoder also reads the token that it begins with.
            computed = found.computed_tokens + len(found.tokens)
            return replace(found, computed_tokens=computed, encoder_s=sum(took))

        return apart

    def encode_answer(self, text: str, answer: str, earlier: Sequence[Turn] = ()) -> list[int]:
        cut = {"max_length": TARGET_TOKENS, "truncation": True}
        return list(self.tokenizer(text_target=answer, **cut)["input_ids"])

    @torch.inference_mode()
    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[torch.Tensor]:
        begin = begin_token_id(self.model.config)
        for text in texts:
            source = self.prepare([text.prompt])
            target = torch.tensor([[begin, *text.answer[:-1]]], device=self.device.torch_device)
            read = self.model(
                input_ids=source.input_ids,
                attention_mask=source.attention_mask,
                decoder_input_ids=target,
                use_cache=False,
            )
            self.device.mark_step()
            yield read.logits[0].float().cpu()

    def new_from(self, prompt_positions: int) -> int:
        return 1  # behind the token that the decoder begins with

    def _check(self, tokens: int, what: str) -> None:
        if self.positions is not None and tokens > self.positions:
            raise BadConfiguration(
                f"{what} {tokens} tokens, and the model was made for {self.positions} positions on "
                "either side; lower max_source_length or output_tokens"
            )


def reading(request: Request, positions: int | None) -> dict[str, Any]:
    """Fields of an engine that reads sources, as a job asks for them."""
    return {
        "context_length": None,  # of source and text together there is no limit
        "positions": positions,
        "source_prefix": str(request.parameters.get("source_prefix") or ""),
        "max_source_length": source_length(request.parameters),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqEngine(SourceReader, TransformersEngine):
    """A sequence-to-sequence model in transformers, in evaluation mode, on its card."""

    source_prefix: str
    max_source_length: int
    positions: int | None

    def generation_config(self, output_tokens: int, ignore_eos: bool) -> GenerationConfig:
        config = TransformersEngine.generation_config(self, output_tokens, ignore_eos)
        config.decoder_start_token_id = begin_token_id(self.model.config)
        return config


def generator(request: Request, positions: int | None, loaded: Mapping[str, Any]) -> Seq2SeqEngine:
    """The engine around a loaded model of transformers."""
    return Seq2SeqEngine(**reading(request, positions), **loaded)
