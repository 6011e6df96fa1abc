"""Torch models that several engines share. Prompts of causal models are padded on the left, so that
all end where generation starts; texts and sources of encoders on the right, as in training."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workloads.base import BadConfiguration, Request
from workloads.data.shapes import Example, Turn
from workloads.devices.base import Device
from workloads.engines.loaded import Answered, Generated, Generation, GenerationEngine, LoadedModel
from workloads.training.pairs import TARGET_TOKENS, begin_token_id, source_length, source_text

#: With static shapes, prompts are padded to multiples of it.
BUCKET = 128
#: Limit of compiled graphs; beyond its limit torch silently stops compiling.
_MOST_GRAPHS = 4096


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded prompts; both tensors [batch, longest prompt]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Inputs of a forward pass by name."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def padded(
    prompts: Sequence[Sequence[int]],
    pad: int,
    *,
    left: bool = False,
    length: int | None = None,  # None: of the longest
    card: str = "cpu",
) -> Batch:
    """Pad prompts on one side and copy them to a card."""
    length = max(map(len, prompts)) if length is None else length
    ids = torch.full((len(prompts), length), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        begin = length - len(prompt) if left else 0
        place = slice(begin, begin + len(prompt))
        ids[row, place] = torch.tensor(prompt, dtype=torch.long)
        mask[row, place] = 1
    return Batch(ids.to(card), mask.to(card))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchModel(GenerationEngine):
    """A causal language model of torch's modules, in evaluation mode, on its card."""

    model: Any
    device: Device
    pad_token_id: int

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Batch:
        longest = self.padded_length(max(map(len, prompts)))
        card = self.device.torch_device
        return padded(prompts, self.pad_token_id, left=True, length=longest, card=card)

    @torch.inference_mode()
    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[torch.Tensor]:
        for text, length in zip(texts, self._lengths(texts), strict=True):
            # Right padding is invisible to causal attention and keeps positions.
            ids = [*text.prompt, *text.answer]
            card = self.device.torch_device
            batch = padded([ids], self.pad_token_id, length=length, card=card)
            read = self._run(**batch.inputs, use_cache=False)
            self.device.mark_step()
            first = len(text.prompt) - 1
            yield read.logits[0, first : first + len(text.answer)].float().cpu()

    def _run(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def _lengths(self, texts: Sequence[Answered]) -> list[int]:
        """Padded length of each text, equal for all if each shape is compiled."""
        own = [len(text.prompt) + len(text.answer) for text in texts]
        return own if self.device.spec.can("dynamic_shapes") else [max(own)] * len(own)

    def new_from(self, prompt_positions: int) -> int:
        """Position of the first new token in what ``generate`` returns."""
        return prompt_positions


@contextlib.contextmanager
def encoder_timed(model: Any, device: Device) -> Iterator[list[float]]:
    """Seconds of each encoder pass in the block, synchronized on both sides."""
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


@dataclass(frozen=True, kw_only=True)  # without slots, which two bases of a class cannot have
class SourceReader(GenerationEngine):
    """Mixin of engines for sequence-to-sequence models."""

    model: Any = None  # None: graphs read sources
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
        longest = self.padded_length(max(map(len, prompts)))
        self._check(longest, "a source has")
        card = self.device.torch_device
        return padded(prompts, self.pad_token_id, length=longest, card=card)

    def generate(self, prepared: Batch, generation: Generation) -> Callable[[], Generated]:
        self._check(generation.output_tokens, "a text may have")
        with encoder_timed(self.model, self.device) as took:
            fetch = super().generate(prepared, generation)  # type: ignore[safe-super]

        def apart() -> Generated:
            found: Generated = fetch()
            # The decoder also reads its start token.
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
            read = self.model(**source.inputs, decoder_input_ids=target, use_cache=False)
            self.device.mark_step()
            yield read.logits[0].float().cpu()

    def config(self, *batch: Any) -> Any:
        """The generation config of a call of transformers' ``generate``."""
        config = super().config(*batch)  # type: ignore[misc]
        config.decoder_start_token_id = begin_token_id(self.model.config)
        return config

    def new_from(self, prompt_positions: int) -> int:
        """Position of the first new token in what ``generate`` returns."""
        return 1  # after the decoder's start token

    def _check(self, tokens: int, what: str) -> None:
        if self.positions is not None and tokens > self.positions:
            raise BadConfiguration(
                f"{what} {tokens} tokens, and the model was made for {self.positions} positions on "
                "either side; lower max_source_length or output_tokens"
            )


def reading(request: Request, positions: int | None) -> dict[str, Any]:
    """Fields of a ``SourceReader`` from a job's settings."""
    return {
        "context_length": None,  # source and text together have no limit
        "positions": positions,
        "source_prefix": str(request.parameters.get("source_prefix") or ""),
        "max_source_length": source_length(request.parameters),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEncoder(LoadedModel, ABC):
    """One loaded encoder, of any engine."""

    pad_token_id: int
    positions: int | None
    card: str  # torch device of batches

    def ids(self, text: str, max_length: int) -> list[int]:
        """Ids of one text, truncated at the end."""
        most = min(max_length, self.positions or max_length)
        return list(self.tokenizer(text, max_length=most, truncation=True)["input_ids"])

    def prepare(self, texts: Sequence[Sequence[int]]) -> Batch:
        """A padded batch on the card."""
        return padded(texts, self.pad_token_id, card=self.card)

    @abstractmethod
    def logits(self, prepared: Batch) -> torch.Tensor:
        """Logits [rows, positions, vocabulary] of a batch."""


def end_token_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """End tokens by generation config, else model config, else tokenizer."""
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, (list, tuple)) else [found])
    return frozenset()


def pad_token_id_of(model: Any, tokenizer: Any) -> int:
    """Padding token; any id will do, since padding is masked."""
    for holder in (tokenizer, getattr(model, "generation_config", None), model.config):
        found = getattr(holder, "pad_token_id", None)
        if isinstance(found, int):
            return found
    return 0


def room_for_graphs() -> contextlib.AbstractContextManager[Any]:
    """Raise the process's limits of compiled graphs for the block."""
    patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(graph_limits())
    return patched


def graph_limits() -> dict[str, int]:
    """Graph limits of torch's compiler, by this release's names."""
    known = "recompile_limit", "cache_size_limit"
    name = next(name for name in known if hasattr(torch._dynamo.config, name))
    return {name: _MOST_GRAPHS, f"accumulated_{name}": _MOST_GRAPHS}
