"""Continuous batching over recorded steps: the slot of a text that has ended takes the next prompt.

Slots never move, so a step is recorded for all of them. Free neighbours are filled by one reading
between two launches; slots without a text go on idle, at position 0. Tokens of a launch of several
steps are fetched together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from workloads.decoding import slots
from workloads.decoding.decoder import STEPS, Generator
from workloads.decoding.slots import Slots
from workloads.generation.admission import PREFILL_TOKENS
from workloads.generation.continuous_batching import Completed


def runs(free: Sequence[int]) -> Iterator[range]:
    """Neighbours among numbers in order."""
    start = 0
    for at in range(1, len(free) + 1):
        if at == len(free) or free[at] != free[at - 1] + 1:
            yield range(free[start], free[at - 1] + 1)
            start = at


class Batch:
    """Prompts on their way through the slots of a generator."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[Sequence[int]],
        *,
        places: int,
        output_tokens: int,
        ends: Collection[int],
        on_admit: Callable[[Sequence[int]], None],
        on_step: Callable[[Sequence[int]], None],
    ) -> None:
        self._generator = generator
        self._prompts = prompts
        self._output_tokens = output_tokens
        self._ends = frozenset(ends)
        self._on_admit, self._on_step = on_admit, on_step
        self._places = min(places, len(prompts))
        self._together = max(1, self._places // 8)  # slots that wait for company
        self._next = 0
        self._running: dict[int, int] = {}  # the prompt in a slot
        self._found: list[list[int]] = [[] for _ in prompts]
        self._computed = 0
        self._steps_apart = True
        longest = max(len(prompt) for prompt in prompts)
        self._state = generator.ready(self._places, longest + output_tokens)
        self._state.set_ends(ends)
        counts = (1, STEPS) if generator.device.records else (1,)
        capacity = self._state.capacity
        lengths = {slots.length_for(p, capacity) for p in range(1, longest + output_tokens + 1)}
        with generator.room():
            for length in sorted(lengths):
                for count in counts:
                    generator.launch(self._state, length, count)

    def run(self) -> Completed:
        """Generate all texts."""
        self._state.done.fill_(1)
        with self._generator.room():
            while self._running or self._next < len(self._prompts):
                free = [slot for slot in range(self._places) if slot not in self._running]
                waiting = len(self._prompts) - self._next
                if waiting and len(free) >= min(self._together, waiting):
                    for run in runs(free):
                        self._admit(run)
                else:
                    self._step()
        return Completed(
            tokens=self._found, computed_tokens=self._computed, steps_apart=self._steps_apart
        )

    def _admit(self, free: range) -> None:
        """Read the next prompts into neighbouring slots, as many as are read well together."""
        new: list[int] = []
        tokens = 0
        for index in range(self._next, min(len(self._prompts), self._next + len(free))):
            tokens += len(self._prompts[index])
            if new and tokens > PREFILL_TOKENS:
                break
            new.append(index)
        if not new:
            return
        self._next += len(new)
        self._on_admit(new)
        part = self._state.part(free.start, free.start + len(new))
        part.done.zero_()
        prompts = self._generator.prepare([self._prompts[index] for index in new])
        self._generator.read_now(part, prompts)
        self._computed += prompts.rows * prompts.longest
        self._running |= dict(zip(free, new, strict=False))
        self._take([part.token.tolist()], dict(zip(free, new, strict=False)))

    def _step(self) -> None:
        """Launch as many steps as every text still needs, and fetch their tokens."""
        state, running = self._state, dict(self._running)
        lengths = [len(self._prompts[i]) + len(self._found[i]) for i in running.values()]
        left = self._output_tokens - max(len(self._found[i]) for i in running.values())
        length = slots.length_for(max(lengths), state.capacity)
        several = self._generator.device.records and left >= STEPS
        count = STEPS if several and max(lengths) + STEPS - 1 <= length else 1
        self._rest(state)
        self._generator.launch(state, length, count)()
        self._steps_apart &= count == 1
        self._computed += state.rows * count
        rows = torch.tensor(list(running), device=state.chosen.device)
        first = torch.tensor([len(self._found[i]) for i in running.values()], device=rows.device)
        steps = torch.arange(count, device=rows.device)[:, None] + first
        self._take(state.chosen[steps, rows].tolist(), running)

    def _rest(self, state: Slots) -> None:
        """Keep slots without a text at position 0, where nothing reads what they write."""
        idle = [slot for slot in range(state.rows) if slot not in self._running]
        if idle:
            rows = torch.tensor(idle, device=state.position.device)
            state.position.index_fill_(0, rows, 0)
            state.done.index_fill_(0, rows, 1)

    def _take(self, steps: Sequence[Sequence[int]], running: dict[int, int]) -> None:
        """Note the tokens of each step, and free the slots of texts that have ended."""
        for tokens in steps:
            fresh = []
            for (slot, index), token in zip(running.items(), tokens, strict=True):
                if self._running.get(slot) != index:
                    continue
                text = self._found[index]
                text.append(token)
                fresh.append(index)
                if token in self._ends or len(text) == self._output_tokens:
                    del self._running[slot]
            if fresh:
                self._on_step(fresh)
