"""Text generation with a decoder as one graph, which reads a prompt and writes a token alike.

The key/value cache is among its inputs and its outputs, with a length that varies: it is empty for
the prompt (prefill), and one longer after each step (decoding). So the weights lie in memory once.
Prompts are padded on the left, as transformers' ``generate`` pads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from workloads.base import BadConfiguration, Request, Unsupported
from workloads.devices.base import Device
from workloads.engines import proof
from workloads.engines.loaded import Generated, GenerationEngine
from workloads.engines.onnxruntime.export import GRAPH, Options, Sample, export, exported_directory
from workloads.engines.onnxruntime.session import Execution, Graph, greedy, open_graph
from workloads.engines.proof import drawn_ids, in_fp32
from workloads.engines.torch_models import Batch, end_token_ids_of, left_padded, pad_token_id_of
from workloads.models import precision as precisions
from workloads.models.loading import ModelSource, load_tokenizer, open_model
from workloads.registry import task_for

#: Beginnings of the names of a cache's tensors, as they enter and as they leave a graph.
_ENTERS, _LEAVES = "input.", "output."
_TEXT = ("input_ids", "attention_mask", "position_ids")
_PROOF_LENGTHS, _PROOF_STEPS = (6, 4, 1), 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderGraph:
    """A decoder's graph with the shapes of its cache: rows, heads, positions, width."""

    graph: Graph
    shapes: Mapping[str, tuple[int, int]]  # heads and width, by the name of an input

    @staticmethod
    def of(graph: Graph) -> DecoderGraph:
        """The decoder that an open graph is.

        Raises:
            BadConfiguration: its inputs are not those of a decoder.
        """
        caches = [name for name in graph.inputs if name not in _TEXT]
        lacking = {"input_ids", "attention_mask"} - graph.inputs.keys()
        shapes = {name: graph.shape(name) for name in caches}
        odd = [name for name in caches if not name.startswith(_ENTERS)]
        odd += [name for name, shape in shapes.items() if not _keeps_positions(shape)]
        if lacking or odd:
            raise BadConfiguration(
                f"the graph takes {', '.join(graph.inputs)}: "
                + (f"without {' and '.join(sorted(lacking))}, " if lacking else "")
                + (f"{', '.join(odd)} are no keys and values; " if odd else "")
                + "a decoder takes ids, a mask and keys and values"
            )
        return DecoderGraph(
            graph=graph,
            shapes={name: (shape[1] or 0, shape[3] or 0) for name, shape in shapes.items()},
        )

    def empty(self, rows: int) -> dict[str, torch.Tensor]:
        """A cache of no positions."""
        return {
            name: torch.empty(rows, heads, 0, width, dtype=self.graph.inputs[name])
            for name, (heads, width) in self.shapes.items()
        }

    def inputs(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """All inputs of a pass over ``ids`` [rows, new] behind what the cache holds; ``mask``
        covers both."""
        return {**_text(self.graph.inputs, ids, mask), **cache}

    def step(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Do such a pass. The logits of the last position [rows, vocabulary], and the cache with
        the new positions."""
        found = self.graph(**self.inputs(ids, mask, cache))
        grown = {name: found[_LEAVES + name.removeprefix(_ENTERS)] for name in self.shapes}
        return found["logits"][:, -1], grown


def _keeps_positions(shape: Sequence[int | None]) -> bool:
    """Tell if a shape is rows, heads, positions, width, the second and fourth of one size."""
    return [size is None for size in shape] == [True, False, True, False]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxDecoder(GenerationEngine):
    """A causal language model as a graph of ONNX Runtime, on its card."""

    decoder: DecoderGraph
    directory: Path  # of its graph
    pad_token_id: int

    def prepare(self, prompts: Sequence[Sequence[int]]) -> Batch:
        self.decoder.graph.take_threads()
        return left_padded(prompts, max(map(len, prompts)), self.pad_token_id)

    def generate(
        self,
        prepared: Batch,
        *,
        output_tokens: int,
        ignore_eos: bool,
        on_step: Callable[[], None],
        keep_logits: bool = False,
    ) -> Callable[[], Generated]:
        ids, mask = prepared.input_ids, prepared.attention_mask
        rows, longest = ids.shape
        cache = self.decoder.empty(rows)

        def step(ids: torch.Tensor) -> torch.Tensor:
            nonlocal cache, mask
            if ids is not prepared.input_ids:
                mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
            found, cache = self.decoder.step(ids, mask, cache)
            return found

        tokens, logits = greedy(
            step,
            ids,
            output_tokens=output_tokens,
            end_token_ids=() if ignore_eos else self.end_token_ids,
            pad_token_id=self.pad_token_id,
            on_step=on_step,
            keep_logits=keep_logits,
        )
        return lambda: Generated(
            tokens=torch.stack(tokens, dim=1).tolist(),
            # The last token of each row is produced but never fed back.
            computed_tokens=rows * (longest + len(tokens) - 1),
            logits=[step.float().cpu() for step in logits],
        )


def load(request: Request, device: Device) -> Any:
    """Open the graph of ``request.model``, exporting it if need be; see ``EngineLoader``."""
    transformers_logging.disable_progress_bar()  # a worker's log is no terminal
    precisions.require(request.precision, device.name, request.engine)
    source = open_model(request.model)
    tokenizer = load_tokenizer(source)
    if task_for(request.workload, source.entry).encoder_decoder:
        from workloads.engines.onnxruntime import seq2seq

        return seq2seq.load(request, device, source, tokenizer)
    base = graph_directory(request, source, tokenizer, device)
    opened = open_graph(base, request, device)
    decoder = DecoderGraph.of(opened.graph)
    apart = differs(decoder, opened.directory)
    figures, details = opened.proved(apart)
    facts = opened.facts
    return OnnxDecoder(
        decoder=decoder,
        directory=opened.directory,
        pad_token_id=facts["pad_token_id"],
        tokenizer=tokenizer,
        source=source,
        weights=opened.weights(),
        end_token_ids=frozenset(facts["end_token_ids"]),
        context_length=facts["positions"],
        details=opened.told({"architecture": facts["architecture"], **details}),
        figures=figures,
    )


def graph_directory(request: Request, source: ModelSource, tokenizer: Any, device: Device) -> Path:
    """The directory of a decoder's graph in fp32, exported if it is not in the node's cache."""
    options = Options.of(request.settings, device.name)

    def build(directory: Path) -> dict[str, Any]:
        model = in_fp32(request, source)
        proof.save(directory, _proof(model))
        facts = export(model, _sample(model), options, directory / GRAPH)
        plain = Graph(directory / GRAPH, Execution(device=device, graph_optimization="basic"))
        differs(DecoderGraph.of(plain), directory).check("fp32", directory / GRAPH)
        return facts | {
            "architecture": type(model).__name__,
            "parameter_count": sum(each.numel() for each in model.parameters()),
            "positions": getattr(model.config, "max_position_embeddings", None),
            "end_token_ids": sorted(end_token_ids_of(model, tokenizer)),
            "pad_token_id": pad_token_id_of(model, tokenizer),
        }

    return exported_directory("decoder", source, options, build)


def _sample(model: Any) -> Sample:
    """Two rows of unlike length that go on behind a cache, with several new tokens each."""
    batch = left_padded(drawn_ids(model, (7, 4)), 7, 0)
    ids, mask = batch.input_ids, batch.attention_mask
    with torch.no_grad():
        first = model(**_text(_takes(model), ids[:, :4], mask[:, :4]), use_cache=True)
    cache = first.past_key_values
    if not hasattr(cache, "layers"):
        raise Unsupported(f"{type(model).__name__} keeps no keys and values to go on from")
    text = _text(_takes(model), ids[:, 4:], mask)
    kept = {"logits_to_keep": 1} if "logits_to_keep" in _takes(model) else {}
    return Sample(
        inputs={**text, "past_key_values": cache, "use_cache": True, **kept},
        varying={**dict.fromkeys(text, (0, 1)), "past_key_values": (0, 2)},
    )


@torch.no_grad()
def _proof(model: Any) -> dict[str, torch.Tensor]:
    """A padded batch, the tokens that torch writes after it, and their logits."""
    batch = left_padded(drawn_ids(model, _PROOF_LENGTHS), max(_PROOF_LENGTHS), 0)
    ids, mask, cache = batch.input_ids, batch.attention_mask, None
    tokens, logits = [], []
    for _ in range(_PROOF_STEPS):
        found = model(**_text(_takes(model), ids, mask), past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        logits.append(found.logits[:, -1].float())
        ids = logits[-1].argmax(-1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "tokens": torch.cat(tokens, dim=1),
        "logits": torch.stack(logits),
    }


def differs(decoder: DecoderGraph, directory: Path) -> proof.Difference:
    """Run a decoder on the batch beside its graph, with torch's tokens, and compare the logits."""
    kept = proof.load(directory)
    ids, mask = kept["input_ids"], kept["attention_mask"]
    cache = decoder.empty(len(ids))
    found = []
    for step in range(kept["tokens"].shape[1]):
        logits, cache = decoder.step(ids, mask, cache)
        found.append(logits.float().cpu())
        ids = kept["tokens"][:, step : step + 1]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return proof.difference(torch.stack(found), kept["logits"])


def _text(taken: Container[str], ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """A forward pass's ids, mask and, where it takes them, positions."""
    text = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in taken:
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        text["position_ids"] = positions[:, -ids.shape[1] :].contiguous()
    return text


def _takes(model: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)
