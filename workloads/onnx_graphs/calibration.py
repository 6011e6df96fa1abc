"""Measures the range of every activation of a graph that static int8 will quantise.

The graph reads prompts of a dataset and writes some tokens after each, so that it is measured on
prompts and on single tokens with a cache alike; every pass is a sample of the calibration.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from workloads.api import JobContext, Request, Result, Sample
from workloads.cache import cache_root
from workloads.data.catalog import load_dataset
from workloads.models.saved import keep, write_origin
from workloads.one_pass import Prompt, encoded_prompts, result_of
from workloads.onnx_graphs.calibrations import RANGES, calibrations_root
from workloads.onnx_graphs.decoder import OnnxDecoder, load
from workloads.onnx_graphs.export import GRAPH, IDENTITY, facts_of
from workloads.onnx_graphs.variants import static_arguments, without_shapes_of_weights
from workloads.workloads.onnx_calibration import OnnxCalibrationParameters


def run(request: Request, context: JobContext) -> Result:
    """Measure and keep the ranges; see ``workloads.api.Workload``."""
    parameters = OnnxCalibrationParameters.model_validate(dict(request.parameters))
    context.enter_phase("load")
    context.resident(f"{request.residency_key}|measured", lambda: None)  # others make room
    context.device.release_memory()
    began = context.clock()
    engine = load(request, context.device)
    load_s = context.clock() - began
    dataset = load_dataset(request.dataset, parameters.reading())
    prompts = encoded_prompts(engine, dataset, parameters.prompts)
    passes = _Passes(engine, prompts, parameters.output_tokens)
    with tempfile.TemporaryDirectory(dir=cache_root()) as aside:
        ranges = Path(aside) / RANGES
        context.enter_phase("measure")
        began, cpu_began = context.clock(), context.cpu_clock()
        measure_ranges(engine.directory / GRAPH, passes, ranges)
        wall_s, cpu_s = context.clock() - began, context.cpu_clock() - cpu_began
        details = {"passes": str(passes.count)}
        if not request.probe:
            context.enter_phase("finish")
            details["calibration"] = str(_keep(request, parameters, engine, ranges))
    sample = Sample(
        repeat=0,
        batch=0,
        warmup=False,
        complete=True,
        wall_s=wall_s,
        cpu_s=cpu_s,
        items=len(prompts),
        input_tokens=sum(map(len, prompts)),
        output_tokens=0,
        computed_tokens=passes.positions,
    )
    return result_of(engine, dataset, sample, load_s=load_s, details=details)


def _keep(
    request: Request, parameters: OnnxCalibrationParameters, engine: OnnxDecoder, ranges: Path
) -> Path:
    """Keep measured ranges under their name, with what they were measured on."""

    def fill(directory: Path) -> None:
        shutil.copyfile(ranges, directory / RANGES)
        origin = {
            "model": request.model,
            "measured": facts_of(engine.directory)[IDENTITY],
            "dataset": request.dataset,
            "prompts": parameters.prompts,
            "output_tokens": parameters.output_tokens,
        }
        write_origin(directory, origin)

    return keep("calibration", calibrations_root() / parameters.save_calibration, fill)


def measure_ranges(graph: Path, passes: _Passes, to: Path) -> None:
    """Write the smallest and largest value of each activation over some passes."""
    from onnxruntime.quantization import quantize_static

    with (
        without_shapes_of_weights(graph) as path,
        tempfile.TemporaryDirectory(dir=cache_root()) as aside,
    ):
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

    def __init__(self, engine: OnnxDecoder, prompts: Sequence[Prompt], output_tokens: int) -> None:
        self.count = self.positions = 0
        self._passes = self._all(engine, prompts, output_tokens)

    def get_next(self) -> dict[str, Any] | None:
        """The inputs of the next pass; None behind the last."""
        return next(self._passes, None)

    def _all(
        self, engine: OnnxDecoder, prompts: Sequence[Prompt], output_tokens: int
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
