"""Greedy generation with continuous batching: the slot of a text that ended takes the next prompt.

In a static batch everyone waits for the longest: texts that have ended are computed on, new prompts
wait outside, and prompts are padded to the longest of them. Here a slot is free when its text ends;
as soon as some are free, the next prompts are read in one pass without padding, and decoding goes
on with all slots. When no prompts are left the batch shrinks. Each text is what it would be alone,
up to rounding: in fp32 the same tokens.

Decisions (which prompts when, which slot) are those of ``Admission``, which knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from workloads.errors import Unsupported
from workloads.generation import kv_cache

#: Prompts are read together up to so many tokens: products gain nothing from more, and their
#: activations take memory.
PREFILL_TOKENS = 512


@dataclass(slots=True, kw_only=True)
class Text:
    """One prompt on its way."""

    index: int  # of the prompt
    prompt_tokens: int
    ids: list[int] = field(default_factory=list)  # generated

    @property
    def length(self) -> int:
        """Tokens whose keys and values are kept: the last one is not fed back yet."""
        return self.prompt_tokens + len(self.ids) - 1


class Admission:
    """Assigns prompts that wait to slots that are free; slots in use are the first ones."""

    def __init__(self, lengths: Sequence[int], slot_count: int) -> None:
        self._lengths = lengths
        self._slots = slot_count
        self._next = 0
        self.running: list[Text] = []
        # Reading a prompt costs a pass of its own; a few slots may wait for company.
        self._together = max(1, slot_count // 8)

    @property
    def over(self) -> bool:
        return not self.running and self._next == len(self._lengths)

    def admit(self) -> list[Text]:
        """The prompts to read now, if any; they take the slots behind those in use."""
        free = self._slots - len(self.running)
        waiting = len(self._lengths) - self._next
        if not waiting or free < min(self._together, waiting):
            return []
        admitted: list[Text] = []
        tokens = 0
        while self._next < len(self._lengths) and len(admitted) < free:
            length = self._lengths[self._next]
            if admitted and tokens + length > PREFILL_TOKENS:
                break
            admitted.append(Text(index=self._next, prompt_tokens=length))
            tokens += length
            self._next += 1
        self.running += admitted
        return admitted

    def remove(self, ended: Callable[[Text], bool]) -> list[tuple[int, int]]:
        """Take ended texts out; the moves (from slot, to slot) that close the gaps, in order."""
        moves = []
        for slot in range(len(self.running)):
            while self.running and ended(self.running[-1]):
                self.running.pop()
            if slot < len(self.running) and ended(self.running[slot]):
                self.running[slot] = self.running.pop()
                moves.append((len(self.running), slot))
        return moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The generated tokens, by prompt."""

    tokens: list[list[int]]  # up to and including the end of sequence
    computed_tokens: int  # positions the device worked on


def check_model(model: Any) -> None:
    """Check that the model can use this KV cache instead of its own.

    Raises:
        Unsupported: it cannot; says why.
    """
    config = model.config
    if not getattr(model, "_supports_attention_backend", False):
        raise Unsupported(
            f"batching continuous: {type(model).__name__} does not call transformers' attention "
            "interface; use batching static or sorted"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        named = ", ".join(sorted(kinds)) or "sliding_window"
        raise Unsupported(f"batching continuous: the model has layers of another kind ({named})")


@contextmanager
def attention_over_kv_cache(model: Any) -> Iterator[None]:
    """The model's layers call ``kv_cache.attend``; afterwards what they called before."""
    from transformers import AttentionInterface

    AttentionInterface.register(kv_cache.NAME, kv_cache.attend)
    before = model.config._attn_implementation
    model.config._attn_implementation = kv_cache.NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    slot_count: int,
    output_tokens: int,
    end_token_ids: Set[int],
    on_admit: Callable[[Sequence[int]], None],
    on_step: Callable[[Sequence[int]], None],
) -> Completed:
    """Generate greedily for all prompts, in at most ``slot_count`` slots at a time.

    Args:
        model: of a kind that ``check_model`` takes, within ``attention_over_kv_cache``.
        prompts: ids of each.
        slot_count: texts that are worked on at a time.
        output_tokens: most of each text.
        end_token_ids: what ends a text; empty for none.
        on_admit: told which prompts are about to be read.
        on_step: told for which prompts a token has been made, when it is on the host.
    """
    admission = Admission([len(prompt) for prompt in prompts], min(slot_count, len(prompts)))
    cache = kv_cache.KVCache(
        min(slot_count, len(prompts)), max(len(prompt) for prompt in prompts) + output_tokens
    )
    device = next(model.parameters()).device
    found: list[list[int]] = [[] for _ in prompts]
    computed = 0

    def ended(text: Text) -> bool:
        return len(text.ids) >= output_tokens or text.ids[-1] in end_token_ids

    def take(texts: Sequence[Text], tokens: Sequence[int]) -> None:
        for text, token in zip(texts, tokens, strict=True):
            text.ids.append(token)
            found[text.index] = text.ids
        on_step([text.index for text in texts])
        in_use = len(admission.running)
        for source, target in admission.remove(ended):
            cache.move(source, target, admission.running[target].length)
        for slot in range(len(admission.running), in_use):
            cache.clear(slot)

    while not admission.over:
        if admitted := admission.admit():
            on_admit([text.index for text in admitted])
            first_slot = len(admission.running) - len(admitted)
            take(admitted, _read(model, cache, prompts, admitted, first_slot, device))
            computed += sum(text.prompt_tokens for text in admitted)
        elif admission.running:
            texts = tuple(admission.running)
            computed += len(texts)
            take(texts, _decode(model, cache, texts, device))
    return Completed(tokens=found, computed_tokens=computed)


def _read(
    model: Any,
    cache: kv_cache.KVCache,
    prompts: Sequence[Sequence[int]],
    admitted: Sequence[Text],
    first_slot: int,
    device: torch.device,
) -> list[int]:
    """Read whole prompts; the first token of each."""
    ids: list[int] = []
    positions: list[int] = []
    segments = []
    for offset, text in enumerate(admitted):
        segments.append(kv_cache.Segment(first_slot + offset, len(ids), text.prompt_tokens))
        ids += prompts[text.index]
        positions += range(text.prompt_tokens)
    last = torch.tensor([s.start + s.length - 1 for s in segments], device=device)
    logits = model(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        logits_to_keep=last,
        cache_pass=kv_cache.Prefill(cache, segments),
    ).logits
    return [int(token) for token in logits[0].argmax(-1).tolist()]


def _decode(
    model: Any, cache: kv_cache.KVCache, texts: Sequence[Text], device: torch.device
) -> list[int]:
    """One more token of each text."""
    lengths = torch.tensor([text.length for text in texts], device=device)
    longest = max(text.length for text in texts) + 1
    beyond = torch.arange(longest, device=device)[None, :] > lengths[:, None]
    mask = torch.zeros(beyond.shape, dtype=model.dtype, device=device)
    mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None, :]
    logits = model(
        input_ids=torch.tensor([[text.ids[-1]] for text in texts], device=device),
        position_ids=lengths[:, None],
        use_cache=False,
        cache_pass=kv_cache.Decode(cache, len(texts), lengths, longest, mask),
    ).logits
    return [int(token) for token in logits[:, -1].argmax(-1).tolist()]
