"""Measures the range of every activation of a graph that static int8 will quantise.

A decoder reads prompts of a dataset and writes some tokens after each, so that it is measured on
prompts and on single tokens with a cache alike; an encoder reads texts. Every pass is a sample of
the calibration.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from workloads.base import JobContext, Request, Result, Sample
from workloads.data.cache import cache_root
from workloads.data.datasets import Dataset, load_dataset
from workloads.engines.calibration import OnnxCalibrationParameters
from workloads.engines.onnxruntime import decoder, encoder
from workloads.engines.onnxruntime.decoder import OnnxDecoder
from workloads.engines.onnxruntime.encoder import OnnxEncoder
from workloads.engines.onnxruntime.export import GRAPH, IDENTITY, facts_of
from workloads.engines.onnxruntime.variants import static_arguments, without_shapes_of_weights
from workloads.engines.passes import Ids, encoded_prompts, result_of
from workloads.models.catalog import find_model
from workloads.models.products import RANGES, origin_by, save_product
from workloads.registry import task_for

#: Tokens of a text that an encoder reads at most, as in text encoding.
LONGEST_TEXT = 128

_Engine: TypeAlias = "OnnxDecoder | OnnxEncoder"
_Inputs: TypeAlias = "Iterator[Mapping[str, torch.Tensor]]"
#: Ids of the texts that are read, and the inputs of the graph for all passes over them.
_Read: TypeAlias = "tuple[Sequence[Ids], _Inputs]"


def run(request: Request, context: JobContext) -> Result:
    """Measure and keep the ranges; see ``workloads.base.Workload``."""
    parameters = OnnxCalibrationParameters.model_validate(dict(request.parameters))
    context.enter_phase("load")
    context.resident(f"{request.residency_key}|measured", lambda: None)  # others make room
    context.device.release_memory()
    began = context.clock()
    load, read = _KINDS[task_for(request.workload, find_model(request.model)).name]
    engine = load(request, context.device)
    load_s = context.clock() - began
    dataset = load_dataset(request.dataset, parameters.reading())
    texts, inputs = read(engine, dataset, parameters)
    passes = _Passes(inputs)
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
        items=len(texts),
        input_tokens=sum(map(len, texts)),
        output_tokens=0,
        computed_tokens=passes.positions,
    )
    return result_of(engine, dataset, sample, load_s=load_s, details=details)


def _keep(
    request: Request, parameters: OnnxCalibrationParameters, engine: _Engine, ranges: Path
) -> Path:
    """Keep measured ranges under their name, with what they were measured on."""
    origin = {
        **origin_by(request),
        "measured": facts_of(engine.directory)[IDENTITY],
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

    def __init__(self, inputs: _Inputs) -> None:
        self.count = self.positions = 0
        self._inputs = inputs

    def get_next(self) -> dict[str, Any] | None:
        """The inputs of the next pass; None behind the last."""
        inputs = next(self._inputs, None)
        if inputs is None:
            return None
        self.count, self.positions = self.count + 1, self.positions + inputs["input_ids"].shape[1]
        return {name: each.cpu().numpy() for name, each in inputs.items()}


def _written(engine: OnnxDecoder, dataset: Dataset, parameters: OnnxCalibrationParameters) -> _Read:
    """Prompts, and a decoder's inputs for each of them and each token that it writes after it."""
    prompts = encoded_prompts(engine, dataset, parameters.prompts)

    def inputs() -> _Inputs:
        graph = engine.decoder
        for prompt in prompts:
            batch = engine.prepare([prompt])
            ids, mask, cache = batch.input_ids, batch.attention_mask, graph.empty(1)
            for _ in range(parameters.output_tokens):
                yield graph.inputs(ids, mask, cache)
                logits, cache = graph.step(ids, mask, cache)
                ids = logits.argmax(-1, keepdim=True).cpu()
                mask = torch.cat([mask, mask.new_ones(1, 1)], dim=1)

    return prompts, inputs()


def _texts(engine: OnnxEncoder, dataset: Dataset, parameters: OnnxCalibrationParameters) -> _Read:
    """Texts, and an encoder's inputs for each of them."""
    chosen = itertools.islice(itertools.cycle(dataset.examples), parameters.prompts)
    texts = tuple(tuple(engine.ids(one.content, LONGEST_TEXT)) for one in chosen)
    return texts, (encoder.inputs(engine.prepare([text])) for text in texts)


_KINDS: Mapping[str, tuple[Any, Callable[[Any, Dataset, OnnxCalibrationParameters], _Read]]] = {
    "causal-lm": (decoder.load, _written),
    "masked-lm": (encoder.load, _texts),
}
