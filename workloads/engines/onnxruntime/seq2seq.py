"""Sequence-to-sequence models as two graphs: one reads the source, one writes a token at a time.

The first gives the keys and values by which every layer of the decoder looks at the source, so that
they are computed once and not at each step; the second takes them with the decoder's own cache,
which is empty at first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines import proof
from workloads.engines.loaded import Answered, Generated, GenerationEngine
from workloads.engines.onnxruntime.export import GRAPH, Options, Sample, export, exported_directory
from workloads.engines.onnxruntime.session import Execution, Graph, greedy, open_graph
from workloads.engines.proof import drawn_ids, in_fp32
from workloads.engines.torch_models import (
    Batch,
    SourceReader,
    end_token_ids_of,
    pad_token_id_of,
    reading,
    right_padded,
)
from workloads.models.loading import ModelSource
from workloads.training.pairs import begin_token_id

ENCODER = "encoder.onnx"
_OWN, _CROSS = "self_attention_cache", "cross_attention_cache"
_ENTERS, _LEAVES = "input.", "output."
_PROOF_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both graphs, open."""

    encoder: Graph
    decoder: Graph

    def read(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Inputs of the decoder that come from the sources, by name."""
        found = self.encoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        crossed = [found[name] for name in self.encoder.outputs if name != "hidden"]
        names = [name for name in self.decoder.inputs if _CROSS in name]
        read = dict(zip(names, crossed, strict=True))
        for name in self.decoder.inputs:
            if name.endswith("last_hidden_state"):
                read[name] = found["hidden"]
        if "attention_mask" in self.decoder.inputs:
            read["attention_mask"] = batch.attention_mask
        return read

    def empty(self, rows: int) -> dict[str, torch.Tensor]:
        """The decoder's own cache, of no positions."""
        shapes = {name: self.decoder.shape(name) for name in self.decoder.inputs if _OWN in name}
        return {
            name: torch.empty(
                rows, shape[1] or 0, 0, shape[3] or 0, dtype=self.decoder.inputs[name]
            )
            for name, shape in shapes.items()
        }

    def step(
        self,
        ids: torch.Tensor,
        read: Mapping[str, torch.Tensor],
        cache: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Write behind ``ids`` [rows, 1]: the logits [rows, vocabulary], and the grown cache."""
        found = self.decoder(decoder_input_ids=ids, **read, **cache)
        grown = {name: found[_LEAVES + name.removeprefix(_ENTERS)] for name in cache}
        return found["logits"][:, -1], grown


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSeq2Seq(SourceReader, GenerationEngine):
    """A sequence-to-sequence model as graphs of ONNX Runtime."""

    pair: Pair
    device: Device
    pad_token_id: int
    begin_token_id: int
    source_prefix: str
    max_source_length: int
    positions: int | None

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Batch:
        for graph in (self.pair.encoder, self.pair.decoder):
            graph.take_threads()
        return SourceReader.prepare(self, prompts)

    def generate(
        self,
        prepared: Batch,
        *,
        output_tokens: int,
        ignore_eos: bool = False,
        on_step: Callable[[], None] = lambda: None,
        keep_logits: bool = False,
        **_: Any,
    ) -> Callable[[], Generated]:
        self._check(output_tokens, "a text may have")
        rows, longest = prepared.input_ids.shape
        began = time.perf_counter()
        read = self.pair.read(prepared)
        encoder_s = time.perf_counter() - began
        cache = self.pair.empty(rows)

        def step(ids: torch.Tensor) -> torch.Tensor:
            nonlocal cache
            found, cache = self.pair.step(ids, read, cache)
            return found

        tokens, logits = greedy(
            step,
            torch.full((rows, 1), self.begin_token_id),
            output_tokens=output_tokens,
            end_token_ids=() if ignore_eos else self.end_token_ids,
            pad_token_id=self.pad_token_id,
            on_step=on_step,
            keep_logits=keep_logits,
        )
        return lambda: Generated(
            tokens=torch.stack(tokens, dim=1).tolist(),
            # The decoder also reads the token that it begins with.
            computed_tokens=rows * (longest + len(tokens)),
            logits=[step.float().cpu() for step in logits],
            encoder_s=encoder_s,
        )

    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[Any]:
        return GenerationEngine.answer_logits(self, texts)  # a reader of sources asks torch's model


def load(request: Request, device: Device, source: ModelSource, tokenizer: Any) -> OnnxSeq2Seq:
    """Open the graphs of ``request.model``, exporting them if need be."""
    opened = open_graph(_directory(request, source, tokenizer, device), request, device)
    pair = Pair(encoder=opened.also(ENCODER), decoder=opened.graph)
    apart = differs(pair, opened.directory)
    figures, details = opened.proved(apart, pair.encoder)
    facts = opened.facts
    return OnnxSeq2Seq(
        pair=pair,
        device=device,
        pad_token_id=facts["pad_token_id"],
        begin_token_id=facts["begin_token_id"],
        tokenizer=tokenizer,
        source=source,
        weights=opened.weights(),
        end_token_ids=frozenset(facts["end_token_ids"]),
        details=opened.told({"architecture": facts["architecture"], **details}),
        figures=figures,
        **reading(request, facts["positions"]),
    )


def _directory(request: Request, source: ModelSource, tokenizer: Any, device: Device) -> Path:
    """The directory of both graphs in fp32, exported if it is not in the node's cache."""
    options = Options.of(request.settings, device.name)

    def build(directory: Path) -> dict[str, Any]:
        model = in_fp32(request, source)
        begin, pad = begin_token_id(model.config), pad_token_id_of(model, tokenizer)
        batch = right_padded(drawn_ids(model, (6, 4, 1)), 6, pad, "cpu")
        proof.save(directory, _proof(model, batch, begin))
        reader, wrote = _samples(model, begin, pad)
        export(_Reader(model, begin).eval(), reader, options, directory / ENCODER)
        facts = export(model, wrote, options, directory / GRAPH, dropped=_CROSS)
        plain = Execution(device=device, graph_optimization="basic")
        pair = Pair(
            encoder=Graph(directory / ENCODER, plain), decoder=Graph(directory / GRAPH, plain)
        )
        differs(pair, directory).check("fp32", directory / GRAPH)
        return facts | {
            "graphs": [GRAPH, ENCODER],
            "architecture": type(model).__name__,
            "parameter_count": sum(each.numel() for each in model.parameters()),
            "positions": getattr(model.config, "max_position_embeddings", None),
            "begin_token_id": begin,
            "end_token_ids": sorted(end_token_ids_of(model, tokenizer)),
            "pad_token_id": pad,
        }

    return exported_directory("seq2seq", source, options, build)


class _Reader(torch.nn.Module):
    """The encoder, with what each layer of the decoder makes of its output once."""

    def __init__(self, model: Any, begin: int) -> None:
        super().__init__()
        self.model = model
        self.begin = begin

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=torch.full_like(input_ids[:, :1], self.begin),
            use_cache=True,
        )
        layers = found.past_key_values.cross_attention_cache.layers
        crossed: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(layers):
            crossed |= {f"keys_{number}": layer.keys, f"values_{number}": layer.values}
        return {**crossed, "hidden": found.encoder_last_hidden_state}


def _samples(model: Any, begin: int, pad: int) -> tuple[Sample, Sample]:
    """Two sources of unlike length, and two steps that have been made after them."""
    batch = right_padded(drawn_ids(model, (7, 4)), 7, pad, "cpu")
    text = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    with torch.no_grad():
        found = model(
            **text,
            decoder_input_ids=torch.full((2, 3), begin),
            use_cache=True,
        )
    cache = found.past_key_values
    if not hasattr(cache, "cross_attention_cache"):
        raise Unsupported(f"{type(model).__name__} keeps no keys and values of its source")
    from transformers.modeling_outputs import BaseModelOutput

    hidden = BaseModelOutput(last_hidden_state=found.encoder_last_hidden_state)
    wrote = Sample(
        inputs={
            "decoder_input_ids": torch.full((2, 1), begin),
            "encoder_outputs": hidden,
            "attention_mask": batch.attention_mask,
            "past_key_values": cache,
            "use_cache": True,
        },
        varying={
            "decoder_input_ids": (0,),
            "encoder_outputs": (0, 1),
            "attention_mask": (0, 1),
            "past_key_values": (0, 2),
        },
    )
    return Sample(inputs=text, varying=dict.fromkeys(text, (0, 1))), wrote


@torch.no_grad()
def _proof(model: Any, batch: Batch, begin: int) -> dict[str, torch.Tensor]:
    """A padded batch of sources, the tokens that torch writes, and their logits."""
    text = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    ids = torch.full((len(batch.input_ids), 1), begin)
    logits = []
    for _ in range(_PROOF_STEPS):
        logits.append(model(**text, decoder_input_ids=ids).logits[:, -1].float())
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
    return {**text, "tokens": ids, "logits": torch.stack(logits)}


def differs(pair: Pair, directory: Path) -> proof.Difference:
    """Run both graphs on the batch beside them, with torch's tokens, and compare the logits."""
    kept = proof.load(directory)
    read = pair.read(Batch(kept["input_ids"], kept["attention_mask"]))
    cache = pair.empty(len(kept["input_ids"]))
    found = []
    for step in range(len(kept["logits"])):
        logits, cache = pair.step(kept["tokens"][:, step : step + 1], read, cache)
        found.append(logits.float().cpu())
    return proof.difference(torch.stack(found), kept["logits"])
