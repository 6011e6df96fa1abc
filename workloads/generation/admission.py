"""Admission of prompts to the slots of continuous batching: which ones when, and to which slot.

Decisions alone: they know no model, and moves are carried out by whoever asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

#: Prompts are read together up to so many tokens: products gain nothing from more, and their
#: activations take memory.
PREFILL_TOKENS = 512


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
