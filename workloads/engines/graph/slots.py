"""Keys, values and the state of every row, in tensors that never move; and the sizes they have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from workloads.engines.graph.layers import Decoder

#: Rows for which steps are recorded: powers of two, and from 8 on their halfway points.
_ROWS = (1, 2, 4, *(n for power in range(3, 12) for n in (2**power, 3 * 2 ** (power - 1))))
#: Positions that a recorded step attends to at most; doubled from here on.
_LENGTH = 256


def rows_for(texts: int) -> int:
    """The rows of a recorded step for so many texts: at most a third of them idle from 8 on."""
    return next((rows for rows in _ROWS if rows >= texts), texts)


def length_for(positions: int, capacity: int) -> int:
    """The positions that a recorded step attends to where so many are in use."""
    length = _LENGTH
    while length < positions:
        length *= 2
    return min(length, capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The tensors of up to ``rows`` texts of up to ``capacity`` positions. They never move, since a
    recorded step reads and writes their addresses: they are made once for as many rows and
    positions as a job needs, and smaller batches use the first rows."""

    keys: tuple[torch.Tensor, ...]  # by layer, [rows, heads, capacity, width]
    values: tuple[torch.Tensor, ...]
    token: torch.Tensor  # [rows]: chosen last, not read yet
    position: torch.Tensor  # [rows]: where it goes
    done: torch.Tensor  # [rows]: 1 where the text has ended
    cursor: torch.Tensor  # [rows]: tokens chosen so far
    chosen: torch.Tensor  # [capacity, rows]
    logits: torch.Tensor  # [rows, vocabulary] of the last step
    hidden: torch.Tensor  # [rows, size]
    ends: torch.Tensor  # ids that end a text, -1 where there are fewer

    @property
    def rows(self) -> int:
        return int(self.token.shape[0])

    @property
    def capacity(self) -> int:
        return int(self.chosen.shape[0])

    def first(self, rows: int) -> Slots:
        """The first rows, in the same memory; ``chosen`` keeps its width."""
        return replace(self.part(0, rows), chosen=self.chosen)

    def part(self, start: int, stop: int) -> Slots:
        """Neighbouring rows, in the same memory."""
        rows = slice(start, stop)
        return Slots(
            keys=tuple(one[rows] for one in self.keys),
            values=tuple(one[rows] for one in self.values),
            token=self.token[rows],
            position=self.position[rows],
            done=self.done[rows],
            cursor=self.cursor[rows],
            chosen=self.chosen[:, rows],
            logits=self.logits[rows],
            hidden=self.hidden[rows],
            ends=self.ends,
        )

    def set_ends(self, ends: Collection[int]) -> None:
        """End texts at these ids from now on; at none where there are none."""
        self.ends.fill_(-1)
        if ends:
            self.ends[: len(ends)] = torch.tensor(sorted(ends), device=self.ends.device)


def make(decoder: Decoder, *, rows: int, capacity: int, ends: int) -> Slots:
    """New slots, all zero: what is beyond a row's end has a weight of zero, and zero times what
    happens to be in memory need not be zero."""
    device, dtype = decoder.embedding.device, decoder.dtype
    shape = (rows, decoder.kv_heads, capacity, decoder.width)

    def cache() -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in decoder.layers)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=torch.long, device=device)

    def floats(*sizes: int, **kind: Any) -> torch.Tensor:
        return torch.zeros(sizes, device=device, **kind)

    return Slots(
        keys=cache(),
        values=cache(),
        token=numbers(rows),
        position=numbers(rows),
        done=numbers(rows),
        cursor=numbers(rows),
        chosen=numbers(capacity, rows),
        logits=floats(rows, decoder.head.rows, dtype=torch.float32),
        hidden=floats(rows, decoder.embedding.shape[1], dtype=dtype),
        ends=numbers(max(ends, 1)).fill_(-1),
    )
