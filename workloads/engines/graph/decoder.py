"""Greedy generation: prefill, then replays of recorded steps.

A step reads each row's last token, writes its key and value and chooses the next one, all on the
card, so several steps can be one launch (``Device.record``). Devices that record nothing run the
same steps one by one. A single row uses Triton kernels (``kernels``) where possible; other steps
run in torch, compiled if launches are recorded or the job says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workloads.devices.base import Device
from workloads.engines.graph import layers
from workloads.engines.graph.layers import Decoder, Product
from workloads.engines.loaded import Generation
from workloads.engines.torch_models import padded, room_for_graphs

#: Steps of a launch, and between checks for the end of all texts.
STEPS = 8
#: Most tokens of a recorded prefill: with more, the card takes longer than the host's queueing.
_RECORDED_TOKENS = 2048
_READ_LENGTH = 64  # recorded prefills are padded to multiples of it


#: Rows of recorded steps: powers of two, and from 8 on their halfway points.
_ROW_COUNTS = (1, 2, 4, *(n for power in range(3, 12) for n in (2**power, 3 * 2 ** (power - 1))))
_LENGTH = 256  # fewest positions that a recorded step attends to; longer ones double it


def rows_for(texts: int) -> int:
    """Rows of a recorded step for so many texts; from 8 on at most a third are idle."""
    return next((rows for rows in _ROW_COUNTS if rows >= texts), texts)


def length_for(positions: int, capacity: int) -> int:
    """Positions that a recorded step attends to, for so many in use."""
    length = _LENGTH
    while length < positions:
        length *= 2
    return min(length, capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Tensors of up to ``rows`` texts of up to ``capacity`` positions. Recorded steps use their
    addresses, so they are made once for a job and smaller batches use the first rows."""

    keys: tuple[torch.Tensor, ...]  # by layer, [rows, heads, capacity, width]
    values: tuple[torch.Tensor, ...]
    token: torch.Tensor  # [rows]: chosen last, not read yet
    position: torch.Tensor  # [rows]: of that token
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
        by_row = ("token", "position", "done", "cursor", "logits", "hidden")
        return replace(
            self,
            keys=tuple(one[rows] for one in self.keys),
            values=tuple(one[rows] for one in self.values),
            chosen=self.chosen[:, rows],
            **{name: getattr(self, name)[rows] for name in by_row},
        )

    def set_ends(self, ends: Collection[int]) -> None:
        """End texts at these ids from now on."""
        self.ends.fill_(-1)
        if ends:
            self.ends[: len(ends)] = torch.tensor(sorted(ends), device=self.ends.device)


def make_slots(decoder: Decoder, *, rows: int, capacity: int, ends: int) -> Slots:
    """New slots, zeroed: positions beyond a row's end weigh zero, but zero times NaN is NaN."""
    device, dtype = decoder.embedding.device, decoder.dtype
    shape = (rows, decoder.kv_heads, capacity, decoder.width)

    def zeros(*sizes: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    return Slots(
        keys=tuple(zeros(*shape, dtype=dtype) for _ in decoder.layers),
        values=tuple(zeros(*shape, dtype=dtype) for _ in decoder.layers),
        token=zeros(rows),
        position=zeros(rows),
        done=zeros(rows),
        cursor=zeros(rows),
        chosen=zeros(capacity, rows),
        logits=zeros(rows, decoder.head.rows, dtype=torch.float32),
        hidden=zeros(rows, decoder.embedding.shape[1], dtype=dtype),
        ends=zeros(max(ends, 1)).fill_(-1),
    )


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts on the card, one a row, padded on the right."""

    ids: torch.Tensor  # [rows, tokens]
    lengths: torch.Tensor  # [rows]
    longest: int

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])


def launches(position: int, steps: int, capacity: int) -> Iterator[tuple[int, int]]:
    """Launches as (positions attended to at most, steps), from the longest row's next position."""
    while steps:
        length = length_for(position + 1, capacity)
        count = STEPS if steps >= STEPS and position + STEPS <= length else 1
        yield length, count
        position += count
        steps -= count


class Generator:
    """A decoder with its slots and recorded launches."""

    def __init__(
        self, decoder: Decoder, device: Device, *, pad: int, ends: int, compiled: bool
    ) -> None:
        self.decoder = decoder
        self.device = device
        self._pad = pad
        self._ends = ends
        self._compiled = compiled
        self._slots: Slots | None = None
        self._launches: dict[tuple[int, ...], Callable[[], None]] = {}
        self._reading: dict[tuple[int, ...], tuple[Prompts, Callable[[], None]]] = {}
        self._layer: Callable[..., torch.Tensor] = layers.decode_layer
        self._product: Product = layers.expanded
        self._expanded: Product = layers.expanded
        if device.triton:
            from workloads.engines.graph import few_rows

            self._product, self._expanded = few_rows.product, few_rows.expanded

    def room(self) -> contextlib.AbstractContextManager[Any]:
        """Raise torch's limit of compiled graphs; enter once a batch."""
        return room_for_graphs() if self._compiled else contextlib.nullcontext()

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Prompts:
        """Copy prompts to the card."""
        card = str(self.decoder.embedding.device)
        batch = padded(prompts, self._pad, card=card)
        lengths = torch.tensor([len(prompt) for prompt in prompts]).to(card)
        return Prompts(batch.input_ids, lengths, batch.input_ids.shape[1])

    @torch.inference_mode()
    def generate(
        self, prompts: Prompts, generation: Generation
    ) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        """Tokens [rows, at most output_tokens] on the card, padded after their ends, logits of each
        step if ``keep_logits``, and the number of steps. ``on_step`` is called when the first
        tokens are queued, and at the end."""
        output_tokens, keep_logits = generation.output_tokens, generation.keep_logits
        state = self.ready(prompts.rows, prompts.longest + output_tokens)
        state.set_ends(generation.ends)
        whole = self._slots
        assert whole is not None
        plan = list(launches(prompts.longest, output_tokens - 1, state.capacity))
        if keep_logits:
            plan = [(length, 1) for length, count in plan for _ in range(count)]
        with self.room():
            replays = [self.launch(state, length, count) for length, count in plan]
            read = self._read(state, prompts)
            state.done.zero_()
            state.done[prompts.rows :] = 1
            read()
            generation.on_step()
            logits = [state.logits[: prompts.rows].clone()] if keep_logits else []
            steps = 1
            for replay, (_, count) in zip(replays, plan, strict=True):
                if generation.ends and bool(state.done.all()):
                    break
                replay()
                steps += count
                if keep_logits:
                    logits.append(state.logits[: prompts.rows].clone())
            generation.on_step()
        return whole.chosen[:steps, : prompts.rows].t(), logits, steps

    @torch.inference_mode()
    def read_logits(self, ids: Sequence[int], first: int) -> torch.Tensor:
        """Logits [positions, vocabulary] of one text from position ``first`` on."""
        prompts = self.prepare([ids])
        hidden = self._read_layers(self.ready(1, prompts.longest), prompts)
        return layers.output(self.decoder, hidden[0, first:])

    def ready(self, texts: int, positions: int) -> Slots:
        """Slots for so many texts; new ones, which drop all launches, if there are too few."""
        rows = rows_for(texts)
        have = self._slots
        if have is None or have.rows < rows or have.capacity < positions:
            self._slots = None
            self._launches.clear()
            self._reading.clear()
            capacity = length_for(positions, self.decoder.cos.shape[0])
            self._slots = have = make_slots(
                self.decoder, rows=rows, capacity=max(capacity, positions), ends=self._ends
            )
        return have.first(rows)

    def launch(self, state: Slots, length: int, count: int) -> Callable[[], None]:
        """A launch of ``count`` steps. Make it before prefill: recording runs the steps."""
        key = (state.rows, length, count)
        if key not in self._launches:
            step = self._step(state, length)

            def steps() -> None:
                for _ in range(count):
                    step()

            for tensor in (state.position, state.cursor, state.token):
                tensor.zero_()
            self._launches[key] = self.device.record(steps)
        return self._launches[key]

    def _step(self, state: Slots, length: int) -> Callable[[], None]:
        kernels = self.device.triton and self.decoder.layers[0].after_out is None
        if state.rows == 1 and kernels:
            from workloads.engines.graph.kernels import SingleRow

            return SingleRow(
                self.decoder, state, pad=self._pad, length=length, early=self.device.records
            )
        if self._compiled and self._layer is layers.decode_layer:
            self._layer = torch.compile(
                layers.decode_layer,
                fullgraph=True,
                dynamic=False,
                backend=self.device.compile_backend,
                options=dict(self.device.compile_options) or None,
            )
        return lambda: self._torch_step(state, length)

    def _torch_step(self, state: Slots, length: int) -> None:
        decoder = self.decoder
        at = state.position
        cos, sin = (table[at, None] for table in (decoder.cos, decoder.sin))
        every = torch.arange(length, device=at.device)
        mask = torch.zeros((state.rows, length), dtype=decoder.dtype, device=at.device)
        mask.masked_fill_(every[None] > at[:, None], float("-inf"))
        hidden = state.hidden
        for layer, keys, values in zip(decoder.layers, state.keys, state.values, strict=True):
            hidden = self._layer(
                decoder,
                layer,
                hidden,
                cos,
                sin,
                keys[:, :, :length],
                values[:, :, :length],
                at,
                mask[:, None, None],
                self._product,
            )
        state.logits.copy_(layers.output(decoder, hidden))
        self._choose(state)

    def _choose(self, state: Slots) -> None:
        token = state.logits.argmax(-1)
        token = token.masked_fill(state.done != 0, self._pad)
        rows = torch.arange(state.rows, device=token.device)
        state.chosen[state.cursor, rows] = token
        state.cursor.add_(1).clamp_(max=state.capacity - 1)
        state.token.copy_(token)
        state.done.logical_or_((token[:, None] == state.ends).any(dim=1))
        state.position.add_(1).clamp_(max=state.capacity - 1)
        state.hidden.copy_(self.decoder.embedding[token])

    def _read(self, state: Slots, prompts: Prompts) -> Callable[[], None]:
        """Return a function that does ``read_now``, recorded where it pays."""
        tokens = -(-prompts.longest // _READ_LENGTH) * _READ_LENGTH
        recorded = (
            self.device.records
            and tokens <= state.capacity
            and prompts.rows * tokens <= _RECORDED_TOKENS
        )
        if not recorded:
            return lambda: self.read_now(state, prompts)
        key = (state.rows, prompts.rows, tokens)
        if key not in self._reading:
            card = prompts.ids.device
            buffer = Prompts(
                torch.zeros((prompts.rows, tokens), dtype=torch.long, device=card),
                torch.ones(prompts.rows, dtype=torch.long, device=card),
                tokens,
            )
            self._reading[key] = buffer, self.device.record(lambda: self.read_now(state, buffer))
        buffer, launch = self._reading[key]

        def read() -> None:
            buffer.ids[:, : prompts.longest].copy_(prompts.ids)
            buffer.lengths.copy_(prompts.lengths)
            launch()

        return read

    def _read_layers(self, state: Slots, prompts: Prompts) -> torch.Tensor:
        """Write the prompts' keys and values to the slots; return the last layer's output."""
        decoder, rows = self.decoder, prompts.rows
        hidden = decoder.embedding[prompts.ids]
        cos, sin = (table[: prompts.longest, None] for table in (decoder.cos, decoder.sin))
        for layer, keys, values in zip(decoder.layers, state.keys, state.values, strict=True):
            hidden = layers.read_layer(
                decoder, layer, hidden, cos, sin, keys[:rows], values[:rows], self._expanded
            )
        return hidden

    def read_now(self, state: Slots, prompts: Prompts) -> None:
        """Read prompts into the first rows and choose the first token of each."""
        rows = prompts.rows
        hidden = self._read_layers(state, prompts)
        last = hidden[torch.arange(rows, device=hidden.device), prompts.lengths - 1]
        state.logits[:rows].copy_(layers.output(self.decoder, last))
        state.position.zero_()
        state.position[:rows].copy_(prompts.lengths - 1)
        state.cursor.zero_()
        self._choose(state)
