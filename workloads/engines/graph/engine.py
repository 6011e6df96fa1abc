"""The engine of recorded steps. Rows are padded on the right, so padding is never attended to; only
the first tokens and the end are reported, since waiting for each step would idle the card.

Continuous batching does recorded steps of all slots; idle ones stay at position 0, and a prefill
between launches fills neighbouring free ones. Requests may come from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines import find_engine
from workloads.engines.graph.decoder import (
    STEPS,
    Generator,
    Prompts,
    Slots,
    length_for,
    rows_for,
)
from workloads.engines.graph.layers import Decoder, read_decoder
from workloads.engines.loaded import (
    Answered,
    ContinuousGeneration,
    Generated,
    Generation,
    GenerationEngine,
)
from workloads.engines.torch_models import end_token_ids_of, pad_token_id_of
from workloads.models import precision as precisions
from workloads.models.catalog import positions_of
from workloads.models.loading import load_config, load_tokenizer, open_model
from workloads.models.precision import ModelWeights
from workloads.registry import task_for

#: Most tokens of a prefill of several prompts: more take memory and gain no speed.
PREFILL_TOKENS = 512


@dataclass(slots=True, kw_only=True)
class Text:
    """One request and its tokens so far."""

    number: int
    prompt: Sequence[int]
    output_tokens: int  # most to generate
    ends: Collection[int]  # ids that end it
    tokens: list[int] = field(default_factory=list)

    @property
    def positions(self) -> int:
        """Positions in use."""
        return len(self.prompt) + len(self.tokens)

    @property
    def left(self) -> int:
        """Most tokens still to generate."""
        return self.output_tokens - len(self.tokens)


def runs(free: Sequence[int]) -> Iterator[range]:
    """Runs of consecutive numbers in a sorted sequence."""
    start = 0
    for at in range(1, len(free) + 1):
        if at == len(free) or free[at] != free[at - 1] + 1:
            yield range(free[start], free[at - 1] + 1)
            start = at


class ContinuousBatch:
    """Texts in the slots of a generator, which nothing else may use meanwhile.

    ``positions`` is the most of a prompt and its answer together. Callbacks get the numbers of
    texts: ``on_admit`` before their prompts are read, ``on_step`` once a token. For a server
    (``serving``) launches are single steps, so that tokens leave at once and new prompts do not
    wait, and compute rows up to the last running slot only: few may run for long.
    """

    @torch.inference_mode()
    def __init__(
        self,
        generator: Generator,
        generation: ContinuousGeneration,
        *,
        positions: int,
        on_end: Callable[[Text], None],
        serving: bool = False,
    ) -> None:
        self._generator, self._generation = generator, generation
        self._positions = positions
        self._serving = serving
        self._on_end = on_end
        self._together = max(1, generation.slots // 8)  # free slots to wait for
        self._changed = threading.Condition()
        self._waiting: deque[Text] = deque()
        self._submitted = 0
        self._closed = False
        self._running: dict[int, Text] = {}  # by slot
        self.computed_tokens = 0
        self.steps_apart = True
        self._state = generator.ready(generation.slots, positions)
        self._state.set_ends(generation.ends)
        self._several = generator.device.records and not serving
        counts = (1, STEPS) if self._several else (1,)
        capacity = self._state.capacity
        lengths = {length_for(p, capacity) for p in range(1, positions + 1)}
        rows = self._state.rows
        sizes = {rows_for(n) for n in range(1, rows + 1)} if serving else {rows}
        with generator.room():
            for length in sorted(lengths):
                for count in counts:
                    for size in sorted(sizes, reverse=True):
                        generator.launch(self._rows(size), length, count)

    @property
    def waiting(self) -> int:
        """Texts that have no slot yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Texts in slots."""
        return len(self._running)

    def _rows(self, rows: int) -> Slots:
        return self._state if rows >= self._state.rows else self._state.first(rows)

    def submit(
        self, prompt: Sequence[int], output_tokens: int, ends: Collection[int] | None = None
    ) -> Text:
        """Queue a request, from any thread, and return it; its tokens grow.

        ``ends`` replaces the batch's own; it must include those. ValueError if the batch is closed,
        or the text does not fit into a slot.
        """
        if len(prompt) + output_tokens > self._positions:
            raise ValueError(
                f"{len(prompt)} tokens and {output_tokens} more need more than the "
                f"{self._positions} positions of a slot"
            )
        with self._changed:
            if self._closed:
                raise ValueError("this batch takes no more requests")
            text = Text(
                number=self._submitted,
                prompt=prompt,
                output_tokens=output_tokens,
                ends=frozenset(self._generation.ends if ends is None else ends),
            )
            self._submitted += 1
            self._waiting.append(text)
            self._changed.notify_all()
        return text

    def cancel(self, text: Text) -> None:
        """End a text at its next token, from any thread; nothing if it has ended."""
        text.output_tokens = len(text.tokens)

    def close(self) -> None:
        """Accept no more requests, so that ``run`` returns when all texts have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @torch.inference_mode()
    def run(self) -> None:
        """Generate for all requests until the batch is closed."""
        self._state.done.fill_(1)
        with self._generator.room():
            while True:
                with self._changed:
                    while not self._running and not self._waiting and not self._closed:
                        self._changed.wait()
                    if not self._running and not self._waiting:
                        return
                slots = range(self._generation.slots)
                free = [slot for slot in slots if slot not in self._running]
                waiting = len(self._waiting)
                if waiting and len(free) >= min(self._together, waiting):
                    for neighbours in runs(free):
                        self._admit(neighbours)
                else:
                    self._step()

    def _admit(self, free: range) -> None:
        """Read the next prompts, up to ``PREFILL_TOKENS``, into neighbouring slots."""
        new: list[Text] = []
        tokens = 0
        while self._waiting and len(new) < len(free):
            tokens += len(self._waiting[0].prompt)
            if new and tokens > PREFILL_TOKENS:
                break
            new.append(self._waiting.popleft())
        if not new:
            return
        self._generation.on_admit([text.number for text in new])
        part = self._state.part(free.start, free.start + len(new))
        part.done.zero_()
        prompts = self._generator.prepare([text.prompt for text in new])
        self._generator.read_now(part, prompts)
        self.computed_tokens += prompts.rows * prompts.longest
        admitted = dict(zip(free, new, strict=False))
        self._running |= admitted
        self._take([part.token.tolist()], admitted)

    def _step(self) -> None:
        """Launch one step, or ``STEPS`` if every text needs them, and fetch the tokens."""
        running = dict(self._running)
        state = self._rows(rows_for(max(running) + 1)) if self._serving else self._state
        longest = max(text.positions for text in running.values())
        left = min(text.left for text in running.values())
        length = length_for(longest, state.capacity)
        several = self._several and left >= STEPS
        count = STEPS if several and longest + STEPS - 1 <= length else 1
        # Idle slots stay at position 0, where nothing reads what they write.
        idle = [slot for slot in range(state.rows) if slot not in running]
        if idle:
            resting = torch.tensor(idle, device=state.position.device)
            state.position.index_fill_(0, resting, 0)
            state.done.index_fill_(0, resting, 1)
        self._generator.launch(state, length, count)()
        self.steps_apart &= count == 1
        self.computed_tokens += state.rows * count
        rows = torch.tensor(list(running), device=state.chosen.device)
        first = torch.tensor([len(t.tokens) for t in running.values()], device=rows.device)
        steps = torch.arange(count, device=rows.device)[:, None] + first
        self._take(state.chosen[steps, rows].tolist(), running)

    def _take(self, steps: Sequence[Sequence[int]], running: dict[int, Text]) -> None:
        """Append the tokens of each step, and free the slots of ended texts."""
        for tokens in steps:
            fresh: list[Text] = []
            ended: list[Text] = []
            for (slot, text), token in zip(running.items(), tokens, strict=True):
                if self._running.get(slot) is not text:
                    continue
                text.tokens.append(token)
                fresh.append(text)
                if token in text.ends or text.left <= 0:
                    ended.append(self._running.pop(slot))
            if fresh:
                self._generation.on_step([text.number for text in fresh])
            for text in ended:
                self._on_end(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEngine(GenerationEngine):
    """A decoder, its slots and its recorded steps."""

    generator: Generator

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Prompts:
        return self.generator.prepare(prompts)

    def generate(self, prepared: Prompts, generation: Generation) -> Callable[[], Generated]:
        tokens, logits, steps = self.generator.generate(prepared, generation)
        tokens = tokens.clone()  # the next batch overwrites them
        computed = prepared.rows * (prepared.longest + steps - 1)
        return lambda: Generated(
            tokens=tokens.tolist(),
            computed_tokens=computed,
            logits=[step.float().cpu() for step in logits],
        )

    def generate_continuously(
        self, prompts: Sequence[Sequence[int]], generation: ContinuousGeneration
    ) -> Generated:
        most = generation.output_tokens
        tokens: list[list[int]] = [[] for _ in prompts]

        def on_end(text: Text) -> None:
            tokens[text.number] = text.tokens

        batch = ContinuousBatch(
            self.generator,
            replace(generation, slots=min(generation.slots, len(prompts))),
            positions=max(map(len, prompts)) + most,
            on_end=on_end,
        )
        for prompt in prompts:
            batch.submit(prompt, most)
        batch.close()
        batch.run()
        return Generated(
            tokens=tokens, computed_tokens=batch.computed_tokens, steps_apart=batch.steps_apart
        )

    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[torch.Tensor]:
        for text in texts:
            read = self.generator.read_logits([*text.prompt, *text.answer], len(text.prompt) - 1)
            yield read[:-1].float().cpu()


def load(request: Request, device: Device) -> GraphEngine:
    """Load ``request.model`` in ``request.precision``; see ``EngineLoader``."""
    means = precisions.require(request.precision, device.name, request.engine).means
    by_mode = find_engine(request.engine).mode(device.name, request.settings) == "compile"
    compiled = device.records or by_mode or bool(request.settings.get("torch_compile"))
    lacking = device.lacks(request.precision) or (device.cannot_compile() if compiled else None)
    if lacking:
        raise Unsupported(f"{request.precision} with the engine {request.engine}: {lacking}")
    source = open_model(request.model, protected=True)
    tokenizer = load_tokenizer(source)
    load_model = task_for(request.workload, source.entry).function("load")
    model = load_model(
        source,
        config=load_config(source),
        attn_implementation="sdpa",
        device_map={"": device.torch_device},
        **{precisions.dtype_keyword(): precisions.compute_dtype(request.precision)},
    ).eval()
    ends, pad = end_token_ids_of(model, tokenizer), pad_token_id_of(model, tokenizer)
    positions = positions_of(model.config.to_dict()) or 0
    kind = request.precision if precisions.quantized(request.precision) else ""
    decoder = read_decoder(model, positions=positions, kind=kind)
    name = type(model).__name__
    del model
    return GraphEngine(
        generator=Generator(decoder, device, pad=pad, ends=len(ends), compiled=compiled),
        tokenizer=tokenizer,
        source=source,
        weights=weights_of(decoder, means),
        end_token_ids=ends,
        context_length=positions,
        details={
            "attention": "static cache",
            "architecture": name,
            "torch_compile": str(compiled).lower(),
        },
    )


def weights_of(decoder: Decoder, means: str) -> ModelWeights:
    """Count stored weights, tied matrices once."""
    matrices = [matrix for layer in decoder.layers for matrix in layer.matrices]
    plain = [decoder.embedding, decoder.norm]
    plain += [vector for layer in decoder.layers for vector in layer.vectors]
    if decoder.head.values.data_ptr() != decoder.embedding.data_ptr():
        plain.append(decoder.head.values)
    packed = sum(matrix.rows * matrix.columns for matrix in matrices)
    count = packed + sum(tensor.numel() for tensor in plain)
    count += sum(matrix.bias.numel() for matrix in matrices if matrix.bias is not None)
    share = packed / count if matrices[0].kind else 0.0
    return ModelWeights(
        weight_bytes=sum(tensor.nbytes for tensor in plain)
        + sum(matrix.stored_bytes for matrix in matrices),
        parameter_count=count,
        quantized_share=share,
        detail=means + (f"; {share:.0%} of the parameters, the rest in bf16" if share else ""),
    )
