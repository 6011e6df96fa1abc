"""Texts of a repeat: kept as long as the row may be of it, and turned into text at the end."""

from __future__ import annotations

from collections.abc import Sequence

from workloads.base import Item
from workloads.engines.passes import Texts


def test_texts_are_decoded_at_the_end_and_the_time_told() -> None:
    """All of the repeat that is asked for, though the row keeps one of them with its ids."""
    clock, decoded = [5.0], []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(tuple(ids))
        clock[0] += 0.25
        return "".join(map(chr, ids))

    texts = Texts(decode, keep=1)
    for repeat in range(4):
        for prompt in range(2):
            item = Item(index=prompt, input_tokens=1, output_tokens=2, latency_s=float(repeat))
            texts.add(repeat, item, [65 + repeat, 65 + prompt])
    assert not decoded
    (first, second), took_s = texts.of(2, lambda: clock[0])
    assert (first.output_text, first.output_ids, first.latency_s) == ("CA", (67, 65), 2.0)
    assert (second.output_text, second.output_ids, second.index) == (None, None, 1)
    assert took_s == 0.5 and decoded == [(67, 65), (67, 66)]
    (newest, _), _ = texts.of(3, lambda: clock[0])
    assert newest.output_text == "DA"
    assert texts.of(1, lambda: clock[0]) == ((), None)  # no row can be of it any more
