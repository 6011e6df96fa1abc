"""Text generation with `batching: continuous` as the timed loop sees it: all prompts are one batch.

A prompt's times begin when it is read, as in a static batch; the wait for a free slot before that
is the queue's, which is no property of the device. The time of a decoding step runs from the end of
the one before: where prompts were read in between, the texts being written waited for that too.
Steps that are launched together, as the engine graph does on CUDA cards, have no times: a row then
tells none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from workloads.base import Item, Unsupported
from workloads.bench.measure import Observation
from workloads.engines.base import Completed
from workloads.generation.prompts import Prompt
from workloads.generation.texts import Texts
from workloads.workloads.text_generation import TextGenerationParameters


class ContinuousGeneration:
    """Runs all prompts of this rank in one pass and keeps what came out, by repeat."""

    def __init__(
        self,
        engine: Any,
        prompts: Sequence[Prompt],
        batch_size: int,
        parameters: TextGenerationParameters,
        clock: Callable[[], float],
        synchronize: Callable[[], None],
    ) -> None:
        if not hasattr(engine, "generate_continuously"):
            raise Unsupported("the engine of this job batches in its own way")
        self._engine = engine
        self._prompts = prompts
        self._batch_size = batch_size
        self._parameters = parameters
        self._clock = clock
        self._synchronize = synchronize
        self.texts = Texts(engine.decode, parameters.keep_texts)

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        """Generate for all prompts; the returned function counts, when the clock has stopped."""
        admitted: dict[int, float] = {}
        token_times: list[list[float]] = [[] for _ in self._prompts]
        steps: list[float] = []  # ends: of the first reading, then of each decoding step

        def on_admit(indices: Sequence[int]) -> None:
            admitted.update(dict.fromkeys(indices, self._clock()))

        def on_step(indices: Sequence[int]) -> None:
            self._synchronize()
            now = self._clock()
            decoded = bool(token_times[indices[0]])
            for index in indices:
                token_times[index].append(now)
            if decoded or not steps:
                steps.append(now)

        ends = frozenset[int]() if self._parameters.ignore_eos else self._engine.end_token_ids
        generated = self._engine.generate_continuously(
            [prompt.ids for prompt in self._prompts],
            slot_count=self._batch_size,
            output_tokens=self._parameters.output_tokens,
            end_token_ids=ends,
            on_admit=on_admit,
            on_step=on_step,
        )
        return lambda: self._observe(repeat, generated, admitted, token_times, steps)

    def _observe(
        self,
        repeat: int,
        generated: Completed,
        admitted: dict[int, float],
        token_times: list[list[float]],
        steps: list[float],
    ) -> Observation:
        items = []
        for index, prompt in enumerate(self._prompts):
            ids = generated.tokens[index]
            item = Item(
                index=prompt.index,
                input_tokens=len(prompt.ids),
                output_tokens=len(ids),
                latency_s=token_times[index][-1] - admitted[index],
                ttft_s=token_times[index][0] - admitted[index],
            )
            self.texts.add(repeat, item, ids)
            items.append(item)
        return Observation(
            items=len(items),
            input_tokens=sum(item.input_tokens for item in items),
            output_tokens=sum(item.output_tokens for item in items),
            computed_tokens=generated.computed_tokens,
            ttft_s=sum(item.ttft_s or 0.0 for item in items) / len(items),
            step_s=tuple(after - before for before, after in pairwise(steps))
            if generated.steps_apart
            else (),
        )
