"""The engine of recorded steps. Rows are padded on the right, so padding is never attended to; only
the first tokens and the end are reported, since waiting for each step would idle the card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines import find_engine
from workloads.engines.graph import description
from workloads.engines.graph.continuous import ContinuousBatch, Text
from workloads.engines.graph.decoder import Generator, Prompts
from workloads.engines.graph.layers import Decoder
from workloads.engines.loaded import (
    Answered,
    Completed,
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
    ) -> Completed:
        """Generate for all prompts in slots; see ``continuous``."""
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
        return Completed(
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
    decoder = description.read(model, positions=positions, kind=kind)
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
