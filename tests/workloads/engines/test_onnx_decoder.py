"""Text generation by graphs: one model of one layer is exported once, and all tests share it; and
how graphs are rewritten."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers.exporters.exporter_onnx")

import numpy
import onnx
import onnx.parser
import onnx_ir
from generation_cases import Worker, request
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from workloads.base import BadConfiguration, DataMissing
from workloads.devices import device_for
from workloads.engines.exports import PROOF, Difference
from workloads.engines.onnxruntime import calibration
from workloads.engines.onnxruntime.export import (
    GRAPH,
    in_precision,
    move_slices_forward,
    without_shapes_of_weights,
)
from workloads.engines.onnxruntime.generation import compare_decoder
from workloads.engines.onnxruntime.session import Graph, Opened, changes, operators_of, share_in
from workloads.models.products import find_calibration

pytestmark = pytest.mark.slow  # exports graphs

STEPS = 12
CPU = device_for("cpu")


@pytest.fixture(scope="module")
def job(small_model: str, dataset: str):
    usual = {"model": small_model, "engine": "onnxruntime", "output_tokens": STEPS}
    return lambda **changes: Worker().run(dataset, **usual | changes)


@pytest.fixture(scope="module")
def measuring(small_model: str, dataset: str):
    usual = {"workload": "onnx-calibration", "model": small_model, "engine": "onnxruntime"}
    return lambda **changes: request(dataset, **usual | changes)


@pytest.fixture(scope="module")
def plain(job):
    return job()


@pytest.fixture(scope="module")
def directory(plain, cache: Path) -> Path:
    (found,) = cache.glob("onnx-decoder-*")
    return found


def texts(result) -> list[tuple[int, ...]]:
    return [item.output_ids for item in result.items]


def test_a_graph_writes_what_generate_writes(job, plain) -> None:
    reference = job(engine="transformers")
    assert texts(plain) == texts(reference)
    assert plain.samples[0].output_tokens == reference.samples[0].output_tokens
    assert plain.samples[0].computed_tokens == reference.samples[0].computed_tokens
    assert len(plain.samples[0].step_s) == len(reference.samples[0].step_s)


def test_a_row_tells_of_the_graph(plain) -> None:
    figures = plain.metrics
    assert figures["export_s"] > 0 and figures["session_start_s"] > 0
    assert figures["largest_output_difference"] < 1e-4 * figures["output_spread"]
    assert figures["graph_bytes"] == plain.weight_bytes > 4 * plain.parameter_count
    told = plain.details
    assert told["providers"] == "CPUExecutionProvider"
    exported = sum(int(pair.split()[1]) for pair in told["operators_exported"].split(", "))
    assert figures["graph_nodes_exported"] == exported > figures["graph_nodes_run"]
    assert "com.microsoft.QuickGelu 0 → 1" in told["operators_changed_by_optimization"]


@pytest.mark.parametrize(
    ("settings", "bytes_of_fp32", "spreads"),
    [({"precision": "fp16"}, 0.53, 0.02), ({"precision": "int8"}, 0.90, 0.5)],
)
def test_other_precisions_are_made_of_the_same_graph(job, plain, settings, bytes_of_fp32, spreads):
    found = job(**settings)
    assert found.weight_bytes < bytes_of_fp32 * plain.weight_bytes
    figures = found.metrics
    assert 0 < figures["largest_output_difference"] < spreads * figures["output_spread"]
    assert figures["export_s"] == plain.metrics["export_s"]  # there was no second export


def test_levels_of_optimization_compute_the_same(job, plain) -> None:
    found = job(graph_optimization="none")
    assert found.metrics["graph_nodes_run"] == found.metrics["graph_nodes_exported"]
    assert found.metrics["graph_nodes_run"] > plain.metrics["graph_nodes_run"]
    assert texts(found) == texts(plain)


def test_static_int8_starts_from_a_calibration(job, plain, measuring, directory, tmp_path) -> None:
    """A job measures the ranges and keeps them under a name; every product of weights but the
    output layer's is then an integer product, its weights with a scale per channel. A node that
    exported the same weights to another path takes the ranges too."""
    measuring_job = measuring(save_calibration="texts", prompts=4, output_tokens=3)
    measured = calibration.run(measuring_job, Worker().context())
    assert int(measured.details["passes"]) == 12
    found = job(precision="int8", calibration="texts")
    assert "QLinearMatMul 0 → 6" in found.details["operators_changed_by_optimization"]
    assert found.metrics["largest_output_difference"] < found.metrics["output_spread"]
    assert found.weight_bytes < 0.9 * plain.weight_bytes
    elsewhere = shutil.copytree(directory, tmp_path / "onnx-decoder-of-another-node")
    of_other_node = in_precision(elsewhere, "int8", "texts")
    assert operators_of(of_other_node / GRAPH)["QuantizeLinear"]
    with pytest.raises(DataMissing, match="did you mean texts"):
        job(precision="int8", calibration="text")
    origin = Path(measured.details["calibration"]) / "nightgrid.json"
    origin.write_text(json.dumps(json.loads(origin.read_text()) | {"measured": "another"}))
    with pytest.raises(BadConfiguration, match="measured another graph"):
        job(precision="int8", calibration="texts")


def test_a_probe_keeps_no_calibration(plain, measuring) -> None:
    """It asks whether a job fits, and would replace ranges of many prompts by those of few."""
    job = measuring(save_calibration="probed", prompts=1, output_tokens=1)
    found = calibration.run(replace(job, probe=True), Worker().context())
    assert found.details["passes"] == "1" and "calibration" not in found.details
    with pytest.raises(DataMissing):
        find_calibration("probed")


def test_a_graph_that_ignores_padding_is_refused(directory, tmp_path) -> None:
    """As an export from one row would lose the mask: the padded batch beside the graph tells,
    before anything is timed."""

    class Unmasked(Graph):
        def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().__call__(**tensors | {"attention_mask": tensors["attention_mask"] | 1})

    graph = Unmasked(directory / GRAPH, CPU)
    apart = compare_decoder({GRAPH: graph}, load_file(directory / PROOF))
    with pytest.raises(BadConfiguration, match="padded batch"):
        apart.check("fp32", tmp_path / GRAPH)
    whole = Difference(largest=float("inf"), spread=1.0)  # numbers that overflowed
    with pytest.raises(BadConfiguration, match="Nothing was timed"):
        whole.check("fp16", tmp_path / GRAPH)


def test_a_session_takes_the_threads_of_the_job(directory) -> None:
    """A model stays loaded between jobs, which may compute with other numbers of threads; the row
    says whether these wait in a loop."""
    graph = Graph(directory / GRAPH, CPU)
    facts = {each.name: {} for each in fields(Opened)} | {"graphs": {GRAPH: graph}}
    opened = Opened(**facts)
    before, cores = torch.get_num_threads(), os.cpu_count() or 1
    details = opened.details_with(architecture="of a row")
    try:
        for threads in (cores, cores + 1, *([1] if cores > 1 else [])):
            torch.set_num_threads(threads)
            graph.take_threads()
            assert graph.threads == threads
            assert details["spinning"] == ("allowed" if threads >= cores else "off")
    finally:
        torch.set_num_threads(before)


def test_a_large_graph_is_converted_by_its_path(directory, cache, tmp_path, monkeypatch) -> None:
    """A graph in memory has 2 GB at most, and the system's directory of temporary files may have
    less: shapes are found from the file, and copies lie in the cache."""

    def too_large(*_, **__):
        raise ValueError("the model exceeds 2 GB")

    monkeypatch.setattr("onnxruntime.transformers.float16.infer_shapes", too_large)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    large = shutil.copytree(directory, tmp_path / "large")
    assert share_in([in_precision(large, "fp16", "") / GRAPH], "FLOAT16") > 0.9
    with without_shapes_of_weights(directory / GRAPH) as copy:
        assert copy.is_relative_to(cache)


def test_a_file_that_is_no_graph_is_named(tmp_path: Path) -> None:
    path = tmp_path / GRAPH
    path.write_bytes(b"\x08\x0a")
    with pytest.raises(DataMissing, match=r"cannot open .*graph\.onnx"):
        Graph(path, CPU)


# Folding, batch-norm replacement and reordering, shown on a small convolution graph.

CHANNELS, SIDE = 4, 16
CONVOLUTION = """\
<ir_version: 10, opset_import: ["" : 20]>
convolution (float[2, 3, 16, 16] x) => (float{shape} y) {{
    a = Conv <pads = [1, 1, 1, 1]> (x, kernel)
    b = BatchNormalization (a, scale, shift, mean, variance)
    constant = Add (one, two)
    c = Mul (b, constant)
    d = Relu (c)
    y = Slice (d, starts, ends, axes)
}}
"""


def convolution(path: Path, axes: tuple[int, ...] = (2, 3)) -> Path:
    """Convolution, batch norm, an addition of two constants, a product, relu, and a crop."""
    sizes = [2, CHANNELS, SIDE, SIDE]
    cropped = [3 if axis in axes else size for axis, size in enumerate(sizes)]
    model = onnx.parser.parse_model(CONVOLUTION.format(shape=cropped))
    shapes = {"kernel": (CHANNELS, 3, 3, 3), "one": (CHANNELS, 1, 1), "two": (CHANNELS, 1, 1)}
    shapes |= dict.fromkeys(("scale", "shift", "mean", "variance"), (CHANNELS,))
    values = {
        name: numpy.linspace(0.5, 1.5, math.prod(shape), dtype=numpy.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    crop = {"starts": [1] * len(axes), "ends": [4] * len(axes), "axes": axes}
    values |= {name: numpy.array(cut, dtype=numpy.int64) for name, cut in crop.items()}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in values.items()
    )
    onnx.save(onnx.shape_inference.infer_shapes(model), str(path))
    return path


def opened(path: Path, level: str = "none") -> tuple[torch.Tensor, Mapping[str, int]]:
    """Output of a graph on a level, and its nodes as they are run."""
    written = path.with_name(f"{level}-{path.name}")
    graph = Graph(path, CPU, level, written_to=written)
    x = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    return graph(x=x)["y"].clone(), operators_of(written)


def moved(path: Path) -> tuple[Path, int]:
    model = onnx_ir.load(str(path))
    passed = move_slices_forward(model)
    to = path.with_name(f"moved-{path.name}")
    onnx_ir.save(model, str(to))
    return to, passed


def test_levels_fold_and_reordering_crops_before_it_computes(tmp_path: Path) -> None:
    """basic folds the constants and the batch norm; no level moves the crop, the rewrite does, and
    all outputs are those of the plain graph."""
    path = convolution(tmp_path / "graph.onnx")
    plain, before = opened(path)
    assert before == {"Conv": 1, "BatchNormalization": 1, "Add": 1, "Mul": 1, "Relu": 1, "Slice": 1}
    basic, after = opened(path, "basic")
    assert changes(before, after) == "Add 1 → 0, BatchNormalization 1 → 0, Mul 1 → 0"
    cropped, passed = moved(path)
    assert passed == 3  # relu, product and batch norm; the convolution's edges need what is cut
    order = [node.op_type for node in onnx.load(str(cropped)).graph.node]
    assert order.index("Slice") < order.index("BatchNormalization") < order.index("Relu")
    _, everything = opened(path, "all")
    assert sum(everything.values()) <= sum(after.values())
    for found in (basic, opened(path, "all")[0], *(opened(cropped, x)[0] for x in ("none", "all"))):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@settings(max_examples=8)
@given(axes=st.sets(st.sampled_from((0, 1, 2, 3)), min_size=1).map(lambda x: tuple(sorted(x))))
def test_reordering_changes_no_output(axes, tmp_path_factory) -> None:
    """Whatever axes are cut: a cut of channels stops at what differs by channel."""
    if 0 in axes:
        axes = tuple(axis for axis in axes if axis) or (2,)  # there are two rows only
    path = convolution(tmp_path_factory.mktemp("graph") / "graph.onnx", axes)
    cropped, passed = moved(path)
    assert passed == (1 if 1 in axes else 3)
    torch.testing.assert_close(opened(cropped)[0], opened(path)[0], rtol=1e-6, atol=1e-6)
