"""The texts that came out of prompts, by repeat: kept while a row may be of them, then told.

Turning ids back into text is no part of a timed repeat. It is done once at the end, for every
text of the repeat that the row is of, and timed by itself (``detokenization_s``), as tokenizing is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workloads.base import Item

#: The row is of the last complete repeat: the newest, or the one before it where that was cut.
_REPEATS = 2


class Texts:
    """The texts of the last repeats.

    Args:
        decode: ids -> text.
        keep: how many texts the row keeps, with their ids, from the first prompt on.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], keep: int) -> None:
        self._decode = decode
        self._keep = keep
        self._repeats: dict[int, list[tuple[Item, tuple[int, ...]]]] = {}

    def add(self, repeat: int, item: Item, ids: Sequence[int]) -> None:
        """Note one prompt of a repeat, in order; ``ids`` are the counted ones."""
        if repeat not in self._repeats:
            for old in [number for number in self._repeats if number <= repeat - _REPEATS]:
                del self._repeats[old]
            self._repeats[repeat] = []
        self._repeats[repeat].append((item, tuple(ids)))

    def told(
        self, repeat: int, clock: Callable[[], float]
    ) -> tuple[tuple[Item, ...], float | None]:
        """The prompts of a repeat, and the seconds that decoding all their texts took; None where
        there are none."""
        found = self._repeats.get(repeat, [])
        began = clock()
        texts = [self._decode(ids) for _, ids in found]
        took_s = clock() - began if found else None
        kept = [
            replace(item, output_text=text, output_ids=ids)
            for (item, ids), text in zip(found[: self._keep], texts[: self._keep], strict=True)
        ]
        return (*kept, *(item for item, _ in found[self._keep :])), took_s
