"""Measure a graph's activation ranges for static int8, decoders in both prefill and decoding."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workloads.base import JobContext, Request, Result, whole_sample
from workloads.data.cache import cache_root
from workloads.data.datasets import load_dataset
from workloads.engines.exports import facts_of
from workloads.engines.onnxruntime import OnnxCalibrationParameters
from workloads.engines.onnxruntime.export import GRAPH, IDENTITY, to_static_int8
from workloads.engines.onnxruntime.forward import load_encoder
from workloads.engines.onnxruntime.generation import OnnxDecoder, decoding
from workloads.engines.onnxruntime.generation import load as load_decoder
from workloads.engines.passes import Ids, encoded_prompts, result_of
from workloads.models.catalog import find_model
from workloads.models.products import RANGES, origin_by, save_product
from workloads.registry import task_for

LONGEST_TEXT = 128  # most tokens an encoder reads, as in text encoding


def run(request: Request, context: JobContext) -> Result:
    """Measure and save the ranges; see ``workloads.base.Workload``."""
    parameters = OnnxCalibrationParameters.model_validate(dict(request.parameters))
    context.enter_phase("load")
    context.resident(f"{request.residency_key}|measured", lambda: None)  # evict other models
    context.device.release_memory()
    began = context.clock()
    decoder = task_for(request.workload, find_model(request.model)).name == "causal-lm"
    engine: Any = (load_decoder if decoder else load_encoder)(request, context.device)
    load_s = context.clock() - began
    dataset = load_dataset(request.dataset, parameters.reading())
    if decoder:
        texts: Sequence[Ids] = encoded_prompts(engine, dataset, parameters.prompts)
        passes = _Passes(_decoder_inputs(engine, texts, parameters.output_tokens))
    else:
        chosen = itertools.islice(itertools.cycle(dataset.examples), parameters.prompts)
        texts = [tuple(engine.ids(example.content, LONGEST_TEXT)) for example in chosen]
        passes = _Passes(engine.prepare([text]).inputs for text in texts)
    with tempfile.TemporaryDirectory(dir=cache_root()) as aside:
        ranges = Path(aside) / RANGES
        context.enter_phase("measure")
        began, cpu_began = context.clock(), context.cpu_clock()
        to_static_int8(engine.directory / GRAPH, Path(aside) / GRAPH, passes, ranges)
        wall_s, cpu_s = context.clock() - began, context.cpu_clock() - cpu_began
        details = {"passes": str(passes.count)}
        if not request.probe:
            context.enter_phase("finish")
            details["calibration"] = str(_keep(request, parameters, engine.directory, ranges))
    sample = whole_sample(
        wall_s=wall_s,
        cpu_s=cpu_s,
        items=len(texts),
        input_tokens=sum(map(len, texts)),
        computed_tokens=passes.positions,
    )
    return result_of(engine, dataset, sample, load_s=load_s, details=details)


def _keep(
    request: Request, parameters: OnnxCalibrationParameters, graph: Path, ranges: Path
) -> Path:
    origin = {
        **origin_by(request),
        "measured": facts_of(graph)[IDENTITY],
        "dataset": request.dataset,
        "prompts": parameters.prompts,
        "output_tokens": parameters.output_tokens,
    }
    return save_product(
        "calibration",
        parameters.save_calibration,
        origin,
        lambda directory: shutil.copyfile(ranges, directory / RANGES),
    )


class _Passes:
    """A ``CalibrationDataReader`` of the graph's inputs."""

    def __init__(self, inputs: Iterator[Mapping[str, torch.Tensor]]) -> None:
        self.count = self.positions = 0
        self._inputs = inputs

    def get_next(self) -> dict[str, Any] | None:
        """Inputs of the next pass; None after the last."""
        inputs = next(self._inputs, None)
        if inputs is None:
            return None
        self.count, self.positions = self.count + 1, self.positions + inputs["input_ids"].shape[1]
        return {name: tensor.cpu().numpy() for name, tensor in inputs.items()}


def _decoder_inputs(
    engine: OnnxDecoder, prompts: Sequence[Ids], output_tokens: int
) -> Iterator[Mapping[str, torch.Tensor]]:
    """A decoder's inputs for each prompt and generated token."""
    for prompt in prompts:
        batch = engine.prepare([prompt])
        writing, ids = decoding(engine.graph, batch), batch.input_ids
        for _ in range(output_tokens):
            yield writing.inputs(ids)
            ids = writing.step(ids).argmax(-1, keepdim=True).cpu()
