"""Encoders (BERT and its kin) as one graph: ids and mask in, the logits of every token out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workloads.base import Request
from workloads.devices.base import Device
from workloads.engines import proof
from workloads.engines.onnxruntime.export import GRAPH, Options, Sample, export, exported_directory
from workloads.engines.onnxruntime.session import Execution, Graph, open_graph
from workloads.engines.proof import drawn_ids, in_fp32
from workloads.engines.torch_models import Batch, LoadedEncoder, right_padded
from workloads.models import precision as precisions
from workloads.models.catalog import usable_positions
from workloads.models.loading import ModelSource, load_tokenizer, open_model

_TEXT = ("input_ids", "attention_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxEncoder(LoadedEncoder):
    """A masked language model as a graph of ONNX Runtime, on its card."""

    graph: Graph
    directory: Path

    def prepare(self, texts: Sequence[Sequence[int]]) -> Batch:
        self.graph.take_threads()
        return LoadedEncoder.prepare(self, texts)

    def logits(self, prepared: Batch) -> torch.Tensor:
        return run(self.graph, prepared)


def inputs(batch: Batch) -> dict[str, torch.Tensor]:
    """All inputs of a pass over a batch."""
    return dict(zip(_TEXT, _tensors(batch), strict=True))


def run(graph: Graph, batch: Batch) -> torch.Tensor:
    """The logits of a batch."""
    return graph(**inputs(batch))["logits"]


def load(request: Request, device: Device) -> OnnxEncoder:
    """Open the graph of ``request.model``, exporting it if need be."""
    precisions.require(request.precision, device.name, request.engine)
    source = open_model(request.model)
    tokenizer = load_tokenizer(source)
    opened = open_graph(_directory(request, source, tokenizer, device), request, device)
    apart = differs(opened.graph, opened.directory)
    figures, details = opened.proved(apart)
    facts = opened.facts
    return OnnxEncoder(
        graph=opened.graph,
        directory=opened.directory,
        tokenizer=tokenizer,
        source=source,
        weights=opened.weights(),
        pad_token_id=facts["pad_token_id"],
        positions=facts["positions"],
        card="cpu",  # ids go to the graph from the host
        details=opened.told({"architecture": facts["architecture"], **details}),
        figures=figures,
    )


def _directory(request: Request, source: ModelSource, tokenizer: Any, device: Device) -> Path:
    """The directory of an encoder's graph in fp32, exported if it is not in the node's cache."""
    options = Options.of(request.settings, device.name)

    def build(directory: Path) -> dict[str, Any]:
        model = in_fp32(request, source)
        pad = int(tokenizer.pad_token_id or 0)
        batch = right_padded(drawn_ids(model, (6, 4, 1)), 6, pad, "cpu")
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        real = batch.attention_mask.bool()  # nobody reads the outputs of padding
        proof.save(directory, {**inputs(batch), "logits": logits[real]})
        facts = export(model, _sample(model, pad), options, directory / GRAPH)
        plain = Graph(directory / GRAPH, Execution(device=device, graph_optimization="basic"))
        differs(plain, directory).check("fp32", directory / GRAPH)
        return facts | {
            "architecture": type(model).__name__,
            "parameter_count": sum(each.numel() for each in model.parameters()),
            "positions": usable_positions(model.config.to_dict()),
            "pad_token_id": pad,
        }

    return exported_directory("encoder", source, options, build)


def _sample(model: Any, pad: int) -> Sample:
    """Two rows of unlike length."""
    batch = right_padded(drawn_ids(model, (7, 4)), 7, pad, "cpu")
    return Sample(
        inputs=inputs(batch),
        varying=dict.fromkeys(_TEXT, (0, 1)),
    )


def _tensors(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.input_ids, batch.attention_mask


def differs(graph: Graph, directory: Path) -> proof.Difference:
    """Run an encoder on the batch beside its graph and compare the logits of real tokens."""
    kept = proof.load(directory)
    found = run(graph, Batch(kept["input_ids"], kept["attention_mask"]))
    return proof.difference(found.cpu()[kept["attention_mask"].bool()], kept["logits"])
