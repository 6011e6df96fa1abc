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
from itertools import groupby
from typing import Any, NamedTuple

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
    length_class: int
    slot: int
    ids: list[int] = field(default_factory=list)  # generated

    @property
    def length(self) -> int:
        """Tokens whose keys and values are kept: the last one is not fed back yet."""
        return self.prompt_tokens + len(self.ids) - 1


class Move(NamedTuple):
    """A text goes to a slot that is free by then; moves are carried out one after the other."""

    text: Text
    source: int
    target: int


class Admission:
    """Assigns prompts that wait to slots that are free.

    Texts of one class of lengths are in slots side by side, classes in ascending order, with free
    slots anywhere between classes. To make room in a class, those between it and a free slot each
    send one text from one side to the other.

    Args:
        lengths: tokens of each prompt.
        slot_count: texts that are worked on at a time.
        length_classes: of each prompt with its text.
    """

    def __init__(
        self, lengths: Sequence[int], slot_count: int, length_classes: Sequence[int]
    ) -> None:
        self._lengths = lengths
        self._classes = length_classes
        self._next = 0
        self._slots: list[Text | None] = [None] * slot_count
        # Reading a prompt costs a pass of its own; a few slots may wait for company.
        self._together = max(1, slot_count // 8)

    @property
    def over(self) -> bool:
        return self._next == len(self._lengths) and not any(self._slots)

    @property
    def running(self) -> list[list[Text]]:
        """The texts of each class that has any, in the order of their slots."""
        texts = [text for text in self._slots if text]
        return [list(own) for _, own in groupby(texts, lambda text: text.length_class)]

    def admit(self) -> tuple[list[Text], list[Move]]:
        """The prompts to read now, if any, in their slots, and the moves that made room before."""
        free = self._slots.count(None)
        waiting = len(self._lengths) - self._next
        admitted: list[Text] = []
        moves: list[Move] = []
        if not waiting or free < min(self._together, waiting):
            return admitted, moves
        tokens = 0
        while self._next < len(self._lengths) and len(admitted) < free:
            length, own = self._lengths[self._next], self._classes[self._next]
            if admitted and tokens + length > PREFILL_TOKENS:
                break
            slot, made_room = self._make_room(own)
            # One that is yet to be read has nothing in its slot.
            moves += [move for move in made_room if move.text.ids]
            text = Text(index=self._next, prompt_tokens=length, length_class=own, slot=slot)
            self._slots[slot] = text
            admitted.append(text)
            tokens += length
            self._next += 1
        return admitted, moves

    def remove(self, ended: Callable[[Text], bool]) -> list[Move]:
        """Take ended texts out; the last ones of their class close the gaps."""
        moves = []
        for texts in self.running:
            first = texts[0].slot
            self._slots[first : first + len(texts)] = [None] * len(texts)
            for at in range(len(texts)):
                while texts and ended(texts[-1]):
                    texts.pop()
                if at < len(texts) and ended(texts[at]):
                    text = texts[at] = texts.pop()
                    moves.append(Move(text, text.slot, first + at))
                    text.slot = first + at
            self._slots[first : first + len(texts)] = texts
        return moves

    def _make_room(self, length_class: int) -> tuple[int, list[Move]]:
        """A free slot at an end of the class, in the direction in which fewer texts move."""
        texts = [text for text in self._slots if text]
        above = 1 + max((t.slot for t in texts if t.length_class <= length_class), default=-1)
        below = -1 + min(
            (t.slot for t in texts if t.length_class >= length_class), default=len(self._slots)
        )
        free = [slot for slot, text in enumerate(self._slots) if not text]
        ways = [(above, self._way(slot, above)) for slot in free if slot >= above][:1]
        ways += [(below, self._way(slot, below)) for slot in free if slot <= below][-1:]
        made, way = min(ways, key=lambda each: len(each[1]))
        moves = []
        for source, target in way:
            text = self._slots[source]
            assert text
            self._slots[source], self._slots[target], text.slot = None, text, target
            moves.append(Move(text, source, target))
        return made, moves

    def _way(self, free: int, to: int) -> list[tuple[int, int]]:
        """From which slot to which texts move until the slot ``to`` is free instead of ``free``,
        with all between them in use."""
        step = 1 if to > free else -1
        way = []
        while free != to:
            far = free + step
            own = self._class_in(far)
            while far != to and self._class_in(far + step) == own:
                far += step
            way.append((far, free))
            free = far
        return way

    def _class_in(self, slot: int) -> int | None:
        text = self._slots[slot]
        return text.length_class if text else None


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
    admission = Admission(lengths, slot_count, kv_cache.length_classes(totals, device))
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
            take(admitted, _read(model, cache, prompts, admitted, device))
            computed += sum(text.prompt_tokens for text in admitted)
        else:
            running = admission.running
            texts = [text for own in running for text in own]
            computed += len(texts)
            take(texts, _decode(model, cache, running, device))
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
    return best_tokens(logits[0])


def _decode(
    model: Any,
    cache: kv_cache.KVCache,
    running: Sequence[Sequence[Text]],
    device: torch.device,
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
