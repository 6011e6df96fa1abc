"""Text generation by graphs with the key/value cache as inputs and outputs.

A decoder is one graph for prefill (empty cache) and decoding, so weights are in memory once.
Prompts are padded on the left, as in transformers' ``generate``. A sequence-to-sequence model is
two: the encoder's also computes every decoder layer's cross-attention keys and values once.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workloads.base import Request, Unsupported
from workloads.devices.base import Device
from workloads.engines.exports import Difference, difference, drawn_ids, in_fp32, text_facts
from workloads.engines.loaded import Answered, Generated, Generation, GenerationEngine
from workloads.engines.onnxruntime.export import GRAPH, Part
from workloads.engines.onnxruntime.session import Exported, Graph, Graphs, open_graphs
from workloads.engines.torch_models import Batch, SourceReader, pad_token_id_of, padded, reading
from workloads.models.loading import load_tokenizer, open_model
from workloads.registry import task_for
from workloads.training.pairs import begin_token_id

ENCODER = "encoder.onnx"
#: Name prefixes of a cache's tensors among a graph's inputs and outputs.
_ENTERS, _LEAVES = "input.", "output."
_TEXT = ("input_ids", "attention_mask", "position_ids")
_OWN, _CROSS = "self_attention_cache", "cross_attention_cache"
#: Lengths of the prompts of a graph's proof, and steps after them.
_PROOF_LENGTHS, _PROOF_STEPS = (6, 4, 1), 3


class Writing:
    """Texts in generation, with their cache; ``others`` maps new ids [rows, new] and the number of
    earlier positions to a pass's other inputs."""

    def __init__(
        self,
        graph: Graph,
        cached: Sequence[str],
        rows: int,
        others: Callable[[torch.Tensor, int], Mapping[str, torch.Tensor]],
    ) -> None:
        self._graph = graph
        self._others = others
        self._cache = {}
        for name in cached:
            _, heads, _, width = graph.shape(name)
            shape = (rows, heads or 0, 0, width or 0)
            self._cache[name] = torch.empty(shape, dtype=graph.inputs[name])

    def inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """All inputs of a pass over new ids after the cached ones."""
        positions = next(iter(self._cache.values())).shape[2]
        return {**self._others(ids, positions), **self._cache}

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Read new ids; return the last position's logits [rows, vocabulary]."""
        outputs = self._graph(**self.inputs(ids))
        self._cache = {name: outputs[_LEAVES + name.removeprefix(_ENTERS)] for name in self._cache}
        return outputs["logits"][:, -1]

    def compare(
        self, ids: torch.Tensor, tokens: torch.Tensor, reference: torch.Tensor
    ) -> Difference:
        """Compare logits with torch's, after ``ids`` and after each of torch's tokens."""
        logits = []
        for step in range(len(reference)):
            logits.append(self.step(ids).float().cpu())
            ids = tokens[:, step : step + 1]
        return difference(torch.stack(logits), reference)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxDecoder(GenerationEngine):
    """A causal language model as a graph of ONNX Runtime, on its card."""

    graph: Graph
    directory: Path  # of its graph
    pad_token_id: int

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Batch:
        self.graph.take_threads()
        return padded(prompts, self.pad_token_id, left=True)

    def generate(self, prepared: Batch, generation: Generation) -> Callable[[], Generated]:
        ids = prepared.input_ids
        writing = decoding(self.graph, prepared)
        return greedy(writing, ids, generation, read=ids.numel(), pad=self.pad_token_id)


def greedy(
    writing: Writing,
    ids: torch.Tensor,
    generation: Generation,
    *,
    read: int,
    pad: int,
    encoder_s: float | None = None,
) -> Callable[[], Generated]:
    """``GenerationEngine.generate`` after ``ids``, until all rows have ended; ``read`` is the count
    of positions computed before the first token."""
    rows = len(ids)
    end_ids = torch.tensor(sorted(generation.ends), dtype=torch.long)
    ended = torch.zeros(rows, dtype=torch.bool)
    tokens: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for _ in range(generation.output_tokens):
        last = writing.step(ids)
        chosen = last.argmax(-1).cpu().masked_fill(ended, pad)
        tokens.append(chosen)
        if generation.keep_logits:
            logits.append(last)
        generation.on_step()
        ended |= torch.isin(chosen, end_ids)
        if bool(ended.all()):
            break
        ids = chosen[:, None]
    return lambda: Generated(
        tokens=torch.stack(tokens, dim=1).tolist(),
        # The last token of each row is not fed back.
        computed_tokens=read + rows * (len(tokens) - 1),
        logits=[step.float().cpu() for step in logits],
        encoder_s=encoder_s,
    )


def load(request: Request, device: Device) -> GenerationEngine:
    """Open the graphs of ``request.model``, exported if missing; see ``EngineLoader``."""
    source = open_model(request.model)
    tokenizer = load_tokenizer(source)
    pair = task_for(request.workload, source.entry).encoder_decoder
    kind, export, compare = (
        ("seq2seq", _export_pair, _compare_pair)
        if pair
        else ("decoder", _export_decoder, compare_decoder)
    )
    opened = open_graphs(
        request, device, source, kind, lambda: export(in_fp32(request, source), tokenizer), compare
    )
    facts = opened.facts
    common: dict[str, Any] = {
        "pad_token_id": facts["pad_token_id"],
        "tokenizer": tokenizer,
        "source": source,
        "weights": opened.weights,
        "end_token_ids": frozenset(facts["end_token_ids"]),
        "details": opened.details_with(architecture=facts["architecture"]),
        "figures": opened.figures,
    }
    if pair:
        return OnnxSeq2Seq(
            graphs=opened.graphs,
            device=device,
            begin_token_id=facts["begin_token_id"],
            **reading(request, facts["positions"]),
            **common,
        )
    return OnnxDecoder(
        graph=opened.graph, directory=opened.directory, context_length=facts["positions"], **common
    )


def decoding(graph: Graph, batch: Batch) -> Writing:
    """Start generation for prompts in a graph of a decoder."""
    cached = [name for name in graph.inputs if name not in _TEXT]
    mask = batch.attention_mask

    def others(ids: torch.Tensor, positions: int) -> dict[str, torch.Tensor]:
        new = positions + ids.shape[1] - mask.shape[1]
        return _text(graph.inputs, ids, torch.nn.functional.pad(mask, (0, new), value=1))

    return Writing(graph, cached, len(mask), others)


def _text(inputs: Container[str], ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ids, mask and, if among ``inputs``, positions of a forward pass."""
    text = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inputs:
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        text["position_ids"] = positions[:, -ids.shape[1] :].contiguous()
    return text


@torch.no_grad()
def _export_decoder(model: Any, tokenizer: Any) -> Exported:
    """Sample: two rows of unequal length, several new tokens each after a cache. Proof: a padded
    batch, torch's tokens after it, and their logits."""
    takes = inspect.signature(model.forward).parameters
    batch = padded(drawn_ids(model, (7, 4)), 0, left=True)
    ids, mask = batch.input_ids, batch.attention_mask
    cache = model(**_text(takes, ids[:, :4], mask[:, :4]), use_cache=True).past_key_values
    if not hasattr(cache, "layers"):
        raise Unsupported(f"{type(model).__name__} keeps no keys and values to go on from")
    text = _text(takes, ids[:, 4:], mask)
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    part = Part(
        module=model,
        inputs={**text, "past_key_values": cache, "use_cache": True, **last_only},
        varying={**dict.fromkeys(text, (0, 1)), "past_key_values": (0, 2)},
    )
    batch = padded(drawn_ids(model, _PROOF_LENGTHS), 0, left=True)
    ids, mask, cache = batch.input_ids, batch.attention_mask, None
    tokens, logits = [], []
    for _ in range(_PROOF_STEPS):
        output = model(**_text(takes, ids, mask), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[:, -1].float())
        ids = logits[-1].argmax(-1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return Exported(
        parts={GRAPH: part},
        proof={**batch.inputs, "tokens": torch.cat(tokens, dim=1), "logits": torch.stack(logits)},
        facts=text_facts(model, tokenizer) | {"pad_token_id": pad_token_id_of(model, tokenizer)},
    )


def compare_decoder(graphs: Graphs, proof: Mapping[str, torch.Tensor]) -> Difference:
    """Compare the logits of a decoder's graph with torch's."""
    batch = Batch(proof["input_ids"], proof["attention_mask"])
    return decoding(graphs[GRAPH], batch).compare(batch.input_ids, proof["tokens"], proof["logits"])


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSeq2Seq(SourceReader):
    """A sequence-to-sequence model as graphs of ONNX Runtime."""

    graphs: Graphs
    begin_token_id: int

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Batch:
        for graph in self.graphs.values():
            graph.take_threads()
        return SourceReader.prepare(self, prompts)

    def generate(self, prepared: Batch, generation: Generation) -> Callable[[], Generated]:
        self._check(generation.output_tokens, "a text may have")
        rows = len(prepared.input_ids)
        began = time.perf_counter()
        writing = answering(self.graphs, prepared)
        return greedy(
            writing,
            torch.full((rows, 1), self.begin_token_id),
            generation,
            # The decoder also reads its start token.
            read=prepared.input_ids.numel() + rows,
            pad=self.pad_token_id,
            encoder_s=time.perf_counter() - began,
        )

    def answer_logits(self, texts: Sequence[Answered]) -> Iterator[Any]:
        return GenerationEngine.answer_logits(self, texts)  # ``SourceReader``'s needs a torch model


def answering(graphs: Graphs, batch: Batch) -> Writing:
    """Encode sources and start generation."""
    encoder, decoder = graphs[ENCODER], graphs[GRAPH]
    outputs = encoder(**batch.inputs)
    crossed = [outputs[name] for name in encoder.outputs if name != "hidden"]
    sources = dict(zip((n for n in decoder.inputs if _CROSS in n), crossed, strict=True))
    for name in decoder.inputs:
        if name.endswith("last_hidden_state"):
            sources[name] = outputs["hidden"]
    if "attention_mask" in decoder.inputs:
        sources["attention_mask"] = batch.attention_mask
    own = [name for name in decoder.inputs if _OWN in name]
    rows = len(batch.input_ids)
    return Writing(decoder, own, rows, lambda ids, _: {"decoder_input_ids": ids, **sources})


class _Encoder(torch.nn.Module):
    """The encoder, with the decoder's cross-attention keys and values."""

    def __init__(self, model: Any, begin: int) -> None:
        super().__init__()
        self.model = model
        self.begin = begin

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=torch.full_like(input_ids[:, :1], self.begin),
            use_cache=True,
        )
        layers = output.past_key_values.cross_attention_cache.layers
        crossed: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(layers):
            crossed |= {f"keys_{number}": layer.keys, f"values_{number}": layer.values}
        return {**crossed, "hidden": output.encoder_last_hidden_state}


@torch.no_grad()
def _export_pair(model: Any, tokenizer: Any) -> Exported:
    """Samples: two sources of unequal length, and a fourth decoding step. Proof: a padded batch of
    sources, torch's tokens, and their logits."""
    from transformers.modeling_outputs import BaseModelOutput

    begin, pad = begin_token_id(model.config), pad_token_id_of(model, tokenizer)
    batch = padded(drawn_ids(model, (7, 4)), pad)
    text = batch.inputs
    output = model(**text, decoder_input_ids=torch.full((2, 3), begin), use_cache=True)
    cache = output.past_key_values
    if not hasattr(cache, "cross_attention_cache"):
        raise Unsupported(f"{type(model).__name__} keeps no keys and values of its source")
    encoder = Part(
        module=_Encoder(model, begin).eval(), inputs=text, varying=dict.fromkeys(text, (0, 1))
    )
    decoder = Part(
        module=model,
        inputs={
            "decoder_input_ids": torch.full((2, 1), begin),
            "encoder_outputs": BaseModelOutput(last_hidden_state=output.encoder_last_hidden_state),
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
        dropped=_CROSS,
    )
    batch = padded(drawn_ids(model, _PROOF_LENGTHS), pad)
    ids = torch.full((len(batch.input_ids), 1), begin)
    logits = []
    for _ in range(_PROOF_STEPS):
        logits.append(model(**batch.inputs, decoder_input_ids=ids).logits[:, -1].float())
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
    return Exported(
        parts={ENCODER: encoder, GRAPH: decoder},
        proof={**batch.inputs, "tokens": ids, "logits": torch.stack(logits)},
        facts=text_facts(model, tokenizer) | {"begin_token_id": begin, "pad_token_id": pad},
    )


def _compare_pair(graphs: Graphs, proof: Mapping[str, torch.Tensor]) -> Difference:
    writing = answering(graphs, Batch(proof["input_ids"], proof["attention_mask"]))
    tokens = proof["tokens"]
    return writing.compare(tokens[:, :1], tokens[:, 1:], proof["logits"])
