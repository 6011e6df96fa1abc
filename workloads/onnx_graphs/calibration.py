"""Measures the range of every activation of a graph that static int8 will quantise.

The graph reads prompts of a dataset and writes some tokens after each, so that it is measured on
prompts and on single tokens with a cache alike; every pass is a sample of the calibration.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workloads.api import JobContext, Request, Result, Sample
from workloads.cache import build_aside, file_lock
from workloads.data.catalog import load_dataset
from workloads.errors import DataMissing
from workloads.onnx_graphs.calibrations import ORIGIN, RANGES, calibrations_root
from workloads.onnx_graphs.decoder import OnnxDecoder, load
from workloads.onnx_graphs.export import GRAPH, IDENTITY, facts_of
from workloads.onnx_graphs.variants import static_arguments, without_shapes_of_weights
from workloads.workloads.onnx_calibration import OnnxCalibrationParameters


def run(request: Request, context: JobContext) -> Result:
    """Measure and keep the ranges; see ``workloads.api.Workload``."""
    parameters = OnnxCalibrationParameters.model_validate(dict(request.parameters))
    context.enter_phase("load")
    began = context.clock()
    engine = load(request, context.device)
    load_s = context.clock() - began
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts = [
        engine.encode(dataset.examples[index % len(dataset.examples)].content)
        for index in range(parameters.prompts)
    ]
    context.enter_phase("measure")
    began, cpu_began = context.clock(), context.cpu_clock()
    passes = _Passes(engine, prompts, parameters.output_tokens)
    graph = engine.directory / GRAPH
    final = calibrations_root() / parameters.save_calibration

    def build(directory: Path) -> None:
        measure_ranges(graph, passes, directory / RANGES)
        origin = {
            "model": request.model,
            "measured": facts_of(engine.directory)[IDENTITY],
            "dataset": request.dataset,
            "prompts": parameters.prompts,
            "output_tokens": parameters.output_tokens,
        }
        (directory / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")

    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(final.with_name(f".{final.name}.lock")):
            build_aside(final, build, replace=True)
    except OSError as error:
        raise DataMissing(f"the calibration cannot be kept in {final}: {error}") from error
    sample = Sample(
        repeat=0,
        batch=0,
        warmup=False,
        complete=True,
        wall_s=context.clock() - began,
        cpu_s=context.cpu_clock() - cpu_began,
        items=len(prompts),
        input_tokens=sum(map(len, prompts)),
        output_tokens=0,
        computed_tokens=passes.positions,
    )
    return Result(
        samples=(sample,),
        stop_reason="max_repeats",
        load_s=load_s,
        weight_bytes=engine.weights.weight_bytes,
        parameter_count=engine.weights.parameter_count,
        random_weights=engine.random_weights,
        synthetic_data=dataset.synthetic,
        precision_detail=engine.weights.detail,
        metrics=engine.figures,
        details={**engine.details, "calibration": str(final), "passes": str(passes.count)},
    )


def measure_ranges(graph: Path, passes: _Passes, to: Path) -> None:
    """Write the smallest and largest value of each activation over some passes."""
    from onnxruntime.quantization import quantize_static

    with without_shapes_of_weights(graph) as path, tempfile.TemporaryDirectory() as aside:
        quantize_static(
            str(path),
            str(Path(aside) / GRAPH),
            passes,
            use_external_data_format=True,
            calibration_cache_path=to,
            **static_arguments(path),
        )


class _Passes:
    """Inputs of the graph, pass by pass, as ``CalibrationDataReader`` gives them."""

    def __init__(self, engine: OnnxDecoder, prompts: list[list[int]], output_tokens: int) -> None:
        self.count = self.positions = 0
        self._passes = self._all(engine, prompts, output_tokens)

    def get_next(self) -> dict[str, Any] | None:
        """The inputs of the next pass; None behind the last."""
        return next(self._passes, None)

    def _all(
        self, engine: OnnxDecoder, prompts: list[list[int]], output_tokens: int
    ) -> Iterator[dict[str, Any]]:
        decoder = engine.decoder
        for prompt in prompts:
            batch = engine.prepare([prompt])
            ids, mask, cache = batch.input_ids, batch.attention_mask, decoder.empty(1)
            for _ in range(output_tokens):
                self.count, self.positions = self.count + 1, self.positions + ids.shape[1]
                inputs = decoder.inputs(ids, mask, cache)
                yield {name: each.cpu().numpy() for name, each in inputs.items()}
                logits, cache = decoder.step(ids, mask, cache)
                ids = logits.argmax(-1, keepdim=True).cpu()
                mask = torch.cat([mask, mask.new_ones(1, 1)], dim=1)
