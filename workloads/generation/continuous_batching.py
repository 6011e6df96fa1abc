"""Greedy generation with continuous batching: the slot of a text that ended takes the next prompt.

In a static batch everyone waits for the longest: texts that have ended are computed on, new prompts
wait outside, and prompts are padded to the longest of them. Here a slot is free when its text ends;
as soon as some are free, the next prompts are read in one pass without padding, and decoding goes
on with all slots. When no prompts are left the batch shrinks. Each text is what it would be alone,
up to rounding: in fp32 the same tokens.

Decisions (which prompts when, which slot) are those of ``Admission``, which knows no model.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from workloads.errors import Unsupported
from workloads.generation import kv_cache
from workloads.models import reach

#: Prompts are read together up to so many tokens: products gain nothing from more, and their
#: activations take memory.
PREFILL_TOKENS = 512
#: Logits of which the greatest is found at a time.
_CHUNK = 64


@dataclass(slots=True, kw_only=True)
class Text:
    """One prompt on its way."""

    index: int  # of the prompt
    prompt_tokens: int
    region: int  # of the KV cache
    slot: int  # of the region
    ids: list[int] = field(default_factory=list)  # generated

    @property
    def length(self) -> int:
        """Tokens whose keys and values are kept: the last one is not fed back yet."""
        return self.prompt_tokens + len(self.ids) - 1


class Admission:
    """Assigns prompts that wait to slots that are free; in each region those in use come first.

    Args:
        lengths: tokens of each prompt.
        slot_count: texts that are worked on at a time.
        regions: of each prompt the region of the KV cache in which it has room.
    """

    def __init__(self, lengths: Sequence[int], slot_count: int, regions: Sequence[int]) -> None:
        self._lengths = lengths
        self._slots = slot_count
        self._regions = regions
        self._next = 0
        self.running: list[list[Text]] = [[] for _ in range(max(regions) + 1)]
        # Reading a prompt costs a pass of its own; a few slots may wait for company.
        self._together = max(1, slot_count // 8)

    @property
    def over(self) -> bool:
        return self._next == len(self._lengths) and not any(self.running)

    def admit(self) -> list[Text]:
        """The prompts to read now, if any; each takes the slot behind those in use."""
        free = self._slots - sum(map(len, self.running))
        waiting = len(self._lengths) - self._next
        if not waiting or free < min(self._together, waiting):
            return []
        admitted: list[Text] = []
        tokens = 0
        while self._next < len(self._lengths) and len(admitted) < free:
            length, region = self._lengths[self._next], self._regions[self._next]
            if admitted and tokens + length > PREFILL_TOKENS:
                break
            slot = len(self.running[region])
            text = Text(index=self._next, prompt_tokens=length, region=region, slot=slot)
            self.running[region].append(text)
            admitted.append(text)
            tokens += length
            self._next += 1
        return admitted

    def remove(self, ended: Callable[[Text], bool]) -> list[tuple[Text, int]]:
        """Take ended texts out; texts moved to close the gaps, with the slot that each left."""
        moves = []
        for texts in self.running:
            for slot in range(len(texts)):
                while texts and ended(texts[-1]):
                    texts.pop()
                if slot < len(texts) and ended(texts[slot]):
                    texts[slot] = texts.pop()
                    moves.append((texts[slot], texts[slot].slot))
                    texts[slot].slot = slot
        return moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The generated tokens, by prompt."""

    tokens: list[list[int]]  # up to and including the end of sequence
    computed_tokens: int  # positions the device worked on
    steps_apart: bool = True  # False: steps launched together, which have no times of their own


def check_model(model: Any) -> None:
    """Check that the model can use this KV cache instead of its own.

    Raises:
        Unsupported: it cannot; says why.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise Unsupported(
            f"batching continuous: {type(model).__name__} does not call transformers' attention "
            "interface; use batching static or sorted"
        )
    if narrow := reach.narrow_layers(model.config):
        named = ", ".join(narrow)
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
    lengths = [len(prompt) for prompt in prompts]
    totals = [length + output_tokens for length in lengths]
    device = next(model.parameters()).device
    cache = kv_cache.KVCache(kv_cache.region_sizes(totals, slot_count, device))
    capacities = [region.capacity for region in cache.regions]
    admission = Admission(
        lengths,
        min(slot_count, len(prompts)),
        [bisect.bisect_left(capacities, total) for total in totals],
    )
    found: list[list[int]] = [[] for _ in prompts]
    computed = 0

    def ended(text: Text) -> bool:
        return len(text.ids) >= output_tokens or text.ids[-1] in end_token_ids

    def take(texts: Sequence[Text], tokens: Sequence[int]) -> None:
        for text, token in zip(texts, tokens, strict=True):
            text.ids.append(token)
            found[text.index] = text.ids
        on_step([text.index for text in texts])
        for text, source in admission.remove(ended):
            cache.move(text.region, source, text.slot, text.length)

    while not admission.over:
        if admitted := admission.admit():
            on_admit([text.index for text in admitted])
            take(admitted, _read(model, cache, prompts, admitted, device))
            computed += sum(text.prompt_tokens for text in admitted)
        else:
            texts = [text for region in admission.running for text in region]
            computed += len(texts)
            take(texts, _decode(model, cache, admission.running, device))
    return Completed(tokens=found, computed_tokens=computed)


def _read(
    model: Any,
    cache: kv_cache.KVCache,
    prompts: Sequence[Sequence[int]],
    admitted: Sequence[Text],
    device: torch.device,
) -> list[int]:
    """Read whole prompts; the first token of each."""
    ids: list[int] = []
    positions: list[int] = []
    segments = []
    for text in admitted:
        segments.append(kv_cache.Segment(text.region, text.slot, len(ids), text.prompt_tokens))
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
    return best_tokens(logits[0])


def _decode(
    model: Any,
    cache: kv_cache.KVCache,
    running: Sequence[Sequence[Text]],
    device: torch.device,
) -> list[int]:
    """One more token of each text, region by region."""
    positions = [[text.length for text in texts] for texts in running]
    work = kv_cache.Decode(cache, positions, model.dtype, device)
    tokens = [[text.ids[-1]] for texts in running for text in texts]
    logits = model(
        input_ids=torch.tensor(tokens, device=device),
        position_ids=work.positions[:, None],
        use_cache=False,
        cache_pass=work,
    ).logits
    return best_tokens(logits[:, -1])


def best_tokens(logits: torch.Tensor) -> list[int]:
    """The first token with the greatest logit of each row: ``argmax``, in two steps.

    On a CPU argmax goes from number to number, and slower still where the rows stand upright, as
    ``LeftLinear`` makes them; the greatest of each chunk is found by vectors.
    """
    rows, vocabulary = logits.shape
    if vocabulary % _CHUNK:
        return [int(token) for token in logits.argmax(-1).tolist()]
    chunks = logits.t().unflatten(0, (-1, _CHUNK))  # [chunks, in each, rows]
    chunk = chunks.amax(1).argmax(0)
    within = chunks[chunk, :, torch.arange(rows, device=logits.device)].argmax(-1)
    return [int(token) for token in (chunk * _CHUNK + within).tolist()]
