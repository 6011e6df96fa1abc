"""Passes of a generating engine over prompts: timed in batches, timed continuously, or just once.

In continuous batches a prompt's times exclude the wait for a free slot, and a decoding step's time
includes prompts read since the one before; steps launched together have no own times. Ids of the
reported repeat are decoded to text at the end, timed separately (``detokenization_s``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from workloads.base import (
    BadConfiguration,
    Item,
    JobContext,
    Request,
    Result,
    Sample,
    Unsupported,
    whole_sample,
)
from workloads.bench.measure import Observation
from workloads.data.datasets import Dataset
from workloads.engines.loaded import (
    Answered,
    ContinuousGeneration,
    Generated,
    Generation,
    GenerationEngine,
)

if TYPE_CHECKING:
    import torch

Ids = tuple[int, ...]  # of one prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of this rank."""

    index: int  # in the dataset
    ids: Ids


#: Rows report the last complete repeat: the newest, or the one before if that was cut.
_REPEATS = 2


class Texts:
    """Texts of the last repeats; the row stores the first ``keep``, with their ids."""

    def __init__(self, decode: Callable[[Sequence[int]], str], keep: int) -> None:
        self._decode = decode
        self._keep = keep
        self._repeats: dict[int, list[tuple[Item, Ids]]] = {}

    def add(self, repeat: int, item: Item, ids: Sequence[int]) -> None:
        """Add a prompt of a repeat, in order; ``ids`` are the counted ones."""
        if repeat not in self._repeats:
            for old in [number for number in self._repeats if number <= repeat - _REPEATS]:
                del self._repeats[old]
        self._repeats.setdefault(repeat, []).append((item, tuple(ids)))

    def of(self, repeat: int, clock: Callable[[], float]) -> tuple[tuple[Item, ...], float | None]:
        """The prompts of a repeat, and the seconds to decode their texts; None without any."""
        prompts = self._repeats.get(repeat)
        if prompts is None:
            return (), None
        began = clock()
        texts = [self._decode(ids) for _, ids in prompts]
        took_s = clock() - began
        items = [
            replace(item, output_text=text, output_ids=ids) if index < self._keep else item
            for index, ((item, ids), text) in enumerate(zip(prompts, texts, strict=True))
        ]
        return tuple(items), took_s

    def answers(self, repeat: int, prompts: Sequence[Prompt]) -> list[Answered]:
        """The prompts of a repeat with their texts."""
        of_index = {prompt.index: prompt.ids for prompt in prompts}
        return [Answered(of_index[item.index], ids) for item, ids in self._repeats.get(repeat, ())]


def count_output_tokens(ids: Sequence[int], end_token_ids: frozenset[int]) -> int:
    """Count tokens up to and including the first end of sequence."""
    return next((n for n, token in enumerate(ids, 1) if token in end_token_ids), len(ids))


@dataclass
class TimedPass:
    """Base of passes over this rank's prompts; ``texts`` has the output by repeat."""

    engine: GenerationEngine
    _: KW_ONLY
    output_tokens: int
    ignore_eos: bool
    keep_texts: int
    clock: Callable[[], float]
    synchronize: Callable[[], None]

    def __post_init__(self) -> None:
        self.ends = frozenset[int]() if self.ignore_eos else self.engine.end_token_ids
        self.texts = Texts(self.engine.decode, self.keep_texts)


@dataclass
class BatchedPass(TimedPass):
    """Static batches; ``counts`` is False if another rank counts the same prompts."""

    batches: Sequence[Sequence[Prompt]]
    counts: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = ([prompt.ids for prompt in batch] for batch in self.batches)
        self._prepared = [self.engine.prepare(ids) for ids in prompts]

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        """Generate for one batch; call the returned function when the clock has stopped."""
        times: list[float] = []

        def on_step() -> None:
            self.synchronize()
            times.append(self.clock())

        began = self.clock()
        generation = Generation(output_tokens=self.output_tokens, ends=self.ends, on_step=on_step)
        fetch = self.engine.generate(self._prepared[batch], generation)
        return lambda: self._observe(repeat, batch, fetch(), began, times)

    def _observe(
        self, repeat: int, batch: int, generated: Generated, began: float, times: list[float]
    ) -> Observation:
        prompts = self.batches[batch]
        counts = [count_output_tokens(ids, self.ends) for ids in generated.tokens]
        steps = max(map(len, generated.tokens))  # may run past the end of all texts
        steps_apart = len(times) >= steps  # else only the first step and the end have times
        counted = zip(prompts, generated.tokens, counts, strict=True) if self.counts else ()
        for prompt, ids, count in counted:
            item = Item(
                index=prompt.index,
                input_tokens=len(prompt.ids),
                output_tokens=count,
                latency_s=(times[count - 1] if steps_apart else times[-1]) - began,
                ttft_s=times[0] - began,
            )
            self.texts.add(repeat, item, ids[:count])
        return Observation(
            items=len(prompts) if self.counts else 0,
            input_tokens=sum(len(prompt.ids) for prompt in prompts) if self.counts else 0,
            output_tokens=sum(counts) if self.counts else 0,
            computed_tokens=generated.computed_tokens,
            ttft_s=times[0] - began,
            step_s=_apart(times[:steps]) if steps_apart else (),
            encoder_s=generated.encoder_s,
        )


@dataclass
class ContinuousPass(TimedPass):
    """All prompts of this rank in continuous batching, ``batch_size`` texts at a time."""

    prompts: Sequence[Prompt]
    batch_size: int

    def run_batch(self, repeat: int, batch: int) -> Callable[[], Observation]:
        """Generate for all prompts; call the returned function when the clock has stopped."""
        admitted: dict[int, float] = {}
        token_times: list[list[float]] = [[] for _ in self.prompts]
        steps: list[float] = []  # end of the first prefill, then of each decoding step

        def on_admit(indices: Sequence[int]) -> None:
            admitted.update(dict.fromkeys(indices, self.clock()))

        def on_step(indices: Sequence[int]) -> None:
            self.synchronize()
            now = self.clock()
            decoded = bool(token_times[indices[0]])
            for index in indices:
                token_times[index].append(now)
            if decoded or not steps:
                steps.append(now)

        generation = ContinuousGeneration(
            slots=self.batch_size,
            output_tokens=self.output_tokens,
            ends=self.ends,
            on_admit=on_admit,
            on_step=on_step,
        )
        prompts = [prompt.ids for prompt in self.prompts]
        generated = self.engine.generate_continuously(prompts, generation)
        return lambda: self._observe(repeat, generated, admitted, token_times, steps)

    def _observe(
        self,
        repeat: int,
        generated: Generated,
        admitted: dict[int, float],
        token_times: list[list[float]],
        steps: list[float],
    ) -> Observation:
        items = []
        rows = zip(self.prompts, generated.tokens, strict=True)
        for index, (prompt, ids) in enumerate(rows):
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
            step_s=_apart(steps) if generated.steps_apart else (),
        )


def _apart(moments: Sequence[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise(moments))


def check_length(longest: int, output_tokens: int, engine: GenerationEngine) -> None:
    """Raise ``Unsupported`` if texts exceed the model's sliding window and the engine has none, and
    ``BadConfiguration`` if they exceed its positions."""
    text = f"the longest prompt has {longest} tokens and {output_tokens} are to be "
    total, room, window = longest + output_tokens, engine.context_length, engine.window
    if window is not None and total > window:
        raise Unsupported(
            f"{text}generated, but layers of the model see {window} positions only, and those of "
            "the engine all; lower output_tokens, set input_tokens or use the engine transformers"
        )
    if room is not None and total > room:
        raise BadConfiguration(
            f"{text}generated, which is more than the model's {room} positions; lower "
            "output_tokens, set input_tokens, or write too_long: cut or skip"
        )


def encoded_prompts(engine: GenerationEngine, dataset: Dataset, count: int) -> tuple[Ids, ...]:
    """Ids of the first ``count`` prompts; short datasets repeat."""
    examples = dataset.examples
    chosen = (examples[index % len(examples)] for index in range(count))
    return tuple(tuple(engine.encode(one.content, one.earlier)) for one in chosen)


def continued(
    engine: GenerationEngine,
    request: Request,
    context: JobContext,
    dataset: Dataset,
    *,
    prompts: int,
    output_tokens: int,
) -> tuple[tuple[Ids, ...], list[list[int]], list[torch.Tensor], Sample]:
    """The first prompts, their new tokens and logits [steps, vocabulary], and the pass."""
    encoded = encoded_prompts(engine, dataset, prompts)
    context.enter_phase("measure")
    generation = Generation(output_tokens=output_tokens, keep_logits=True)
    batches, sample = generate_once(engine, context, encoded, request.batch_size, generation)
    return encoded, *by_prompt(batches), sample


def generate_once(
    engine: GenerationEngine,
    context: JobContext,
    prompts: Sequence[Ids],
    batch_size: int,
    generation: Generation,
) -> tuple[list[Generated], Sample]:
    """Generate in batches, past any end; return outputs and the pass as a sample."""
    check_length(max(map(len, prompts)), generation.output_tokens, engine)
    began, cpu_began = context.clock(), context.cpu_clock()
    found = []
    for start in range(0, len(prompts), batch_size):
        prepared = engine.prepare(prompts[start : start + batch_size])
        found.append(engine.generate(prepared, generation)())
    context.device.synchronize()
    sample = whole_sample(
        wall_s=context.clock() - began,
        cpu_s=context.cpu_clock() - cpu_began,
        items=len(prompts),
        input_tokens=sum(map(len, prompts)),
        output_tokens=len(prompts) * generation.output_tokens,
    )
    return found, sample


def by_prompt(batches: Sequence[Generated]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens and logits [steps, vocabulary] of each prompt."""
    import torch

    tokens = [list(row) for batch in batches for row in batch.tokens]
    logits = [row for batch in batches for row in torch.stack(list(batch.logits), dim=1)]
    return tokens, logits


def result_of(
    engine: GenerationEngine,
    dataset: Dataset,
    sample: Sample,
    *,
    load_s: float = 0.0,
    metrics: Mapping[str, float] | None = None,
    details: Mapping[str, str],
) -> Result:
    """Result of a pass, with fields of the engine and the dataset."""
    return Result(
        samples=(sample,),
        stop_reason="max_repeats",
        load_s=load_s,
        weight_bytes=engine.weights.weight_bytes,
        parameter_count=engine.weights.parameter_count,
        random_weights=engine.random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=engine.weights.detail,
        metrics={**engine.figures, **(metrics or {})},
        details={**engine.details, **dataset.details, **details},
    )
