"""Greedy generation with continuous batching: the slot of a text that ended takes the next prompt.

In a static batch everyone waits for the longest: texts that have ended are computed on, new prompts
wait outside, and prompts are padded to the longest of them. Here a slot is free when its text ends;
as soon as some are free, the next prompts are read in one pass without padding, and decoding goes
on with all slots. When no prompts are left the batch shrinks. Each text is what it would be alone,
up to rounding: in fp32 the same tokens.

Decisions (which prompts when, which slot) are those of ``Admission``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from workloads.errors import Unsupported
from workloads.generation import kv_cache
from workloads.generation.admission import Admission, Move, Text
from workloads.generation.native.products import greatest
from workloads.generation.packed_layer import by_rows
from workloads.models import reach

#: Logits of which the greatest is found at a time.
_CHUNK = 64


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
    slot_count = min(slot_count, len(prompts))
    cache = kv_cache.KVCache(slot_count, max(totals))
    in_code = by_rows(model)
    classes = [0] * len(totals) if in_code else kv_cache.length_classes(totals, device)
    admission = Admission(lengths, slot_count, classes)
    found: list[list[int]] = [[] for _ in prompts]
    computed = 0

    def ended(text: Text) -> bool:
        return len(text.ids) >= output_tokens or text.ids[-1] in end_token_ids

    def take(texts: Sequence[Text], tokens: Sequence[int]) -> None:
        for text, token in zip(texts, tokens, strict=True):
            text.ids.append(token)
            found[text.index] = text.ids
        on_step([text.index for text in texts])
        carry_out(admission.remove(ended))

    def carry_out(moves: Sequence[Move]) -> None:
        for text, source, target in moves:
            cache.move(source, target, text.length)

    while not admission.over:
        admitted, moves = admission.admit()
        carry_out(moves)
        if admitted:
            on_admit([text.index for text in admitted])
            take(admitted, _read(model, cache, prompts, admitted, device, in_code))
            computed += sum(text.prompt_tokens for text in admitted)
        else:
            running = admission.running
            texts = [text for own in running for text in own]
            computed += len(texts)
            take(texts, _decode(model, cache, running, device, in_code))
    return Completed(tokens=found, computed_tokens=computed)


def _read(
    model: Any,
    cache: kv_cache.KVCache,
    prompts: Sequence[Sequence[int]],
    admitted: Sequence[Text],
    device: torch.device,
    in_code: bool,
) -> list[int]:
    """Read whole prompts; the first token of each."""
    ids: list[int] = []
    positions: list[int] = []
    segments = []
    for text in admitted:
        segments.append(kv_cache.Segment(text.slot, len(ids), text.prompt_tokens))
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
    return best_tokens(logits[0], in_code=in_code)


def _decode(
    model: Any,
    cache: kv_cache.KVCache,
    running: Sequence[Sequence[Text]],
    device: torch.device,
    in_code: bool,
) -> list[int]:
    """One more token of each text, class by class."""
    groups = [(texts[0].slot, [text.length for text in texts]) for texts in running]
    work = kv_cache.Decode(cache, groups, model.dtype, device)
    tokens = [[text.ids[-1]] for texts in running for text in texts]
    logits = model(
        input_ids=torch.tensor(tokens, device=device),
        position_ids=work.positions[:, None],
        use_cache=False,
        cache_pass=work,
    ).logits
    return best_tokens(logits[:, -1], in_code=in_code)


def best_tokens(logits: torch.Tensor, *, in_code: bool = False) -> list[int]:
    """The first token with the greatest logit of each row: ``argmax``, in two steps, or by the
    machine code that the model uses.

    On a CPU argmax goes from number to number, and slower still where the rows stand upright, as
    ``LeftLinear`` makes them; the greatest of each chunk is found by vectors.
    """
    if in_code and (found := greatest(logits)) is not None:
        return [int(token) for token in found.tolist()]
    rows, vocabulary = logits.shape
    if vocabulary % _CHUNK:
        return [int(token) for token in logits.argmax(-1).tolist()]
    chunks = logits.t().unflatten(0, (-1, _CHUNK))  # [chunks, in each, rows]
    chunk = chunks.amax(1).argmax(0)
    within = chunks[chunk, :, torch.arange(rows, device=logits.device)].argmax(-1)
    return [int(token) for token in (chunk * _CHUNK + within).tolist()]
