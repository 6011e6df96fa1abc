"""A graph in other precisions, made of the one that was exported, once into the node's cache.

fp16 converts weights and operators. Dynamic int8 stores the matrices of linear layers in 8 bits and
takes the range of each activation when it comes. Static int8 has measured those ranges beforehand
on a calibration set (``calibration.py``) and writes them into the graph, as pairs of operators that
quantise and dequantise (QDQ), which ONNX Runtime turns into integer products.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workloads.base import BadConfiguration, Unsupported
from workloads.data.cache import cache_root, cached_directory
from workloads.engines.exports import PROOF, digest, facts_of, package_versions, write_facts
from workloads.engines.onnxruntime import SPEC
from workloads.models.products import find_calibration

GRAPH = "graph.onnx"
#: The fact that is equal on all nodes that export the same weights alike; directories' names, made
#: of paths and times, are not.
IDENTITY = "identity"
#: Raise when exports become something else: it is in the cache's keys.
_RECIPE = 2
#: Packages whose versions change what is exported.
_PACKAGES = ("torch", "transformers", "diffusers", *(package.name for package in SPEC.packages))
#: Operators whose weights are stored in 8 bits.
_QUANTIZED = ("MatMul", "Gemm")


def key_of(kind: str, *parts: object) -> str:
    """The cache's name for something that is made of these parts by the installed versions."""
    return f"onnx-{kind}-{digest(_RECIPE, kind, package_versions(_PACKAGES), *parts)}"


def graphs_of(directory: Path) -> list[str]:
    """The files of the graphs in a directory."""
    return list(facts_of(directory).get("graphs", [GRAPH]))


def in_precision(base: Path, precision: str, calibration: str) -> Path:
    """The directory of an exported graph in a precision: ``base`` itself for fp32.

    Args:
        base: directory of the graph in fp32.
        calibration: name of a calibration for static int8; "" for dynamic.

    Raises:
        DataMissing: there is no such calibration.
        BadConfiguration: it is one of another graph.
    """
    if precision == "fp32":
        return base
    if precision == "fp16":
        return _made(base, "fp16", (), _to_fp16)
    if not calibration:
        return _made(base, "int8-dynamic", (), _to_dynamic_int8)
    ranges = find_calibration(calibration)
    if ranges.graph != facts_of(base)[IDENTITY]:
        raise BadConfiguration(
            f"calibration {calibration!r} measured another graph "
            f"({ranges.origin.get('model')}); let a job of "
            "onnx-calibration with this model and these settings of graphs save one"
        )
    return _made(
        base,
        "int8-static",
        (ranges.digest,),
        lambda source, target: to_static_int8(source, target, None, ranges.ranges),
    )


def _made(
    base: Path, kind: str, parts: tuple[object, ...], write: Callable[[Path, Path], None]
) -> Path:
    """The directory of a variant, with what is known of its base beside the graph."""

    def build(directory: Path) -> None:
        for name in graphs_of(base):
            write(base / name, directory / name)
        write_facts(directory, facts_of(base))
        shutil.copy(base / PROOF, directory / PROOF)

    return cached_directory(key_of(kind, base.name, *parts), build)


def _to_fp16(source: Path, target: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    # By its path: shapes in a graph that is in memory are found up to 2 GB, weights included.
    _save(convert_float_to_float16(str(source), disable_shape_infer=False), target)


def _to_dynamic_int8(source: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with without_shapes_of_weights(source) as path:
        quantize_dynamic(
            str(path),
            str(target),
            nodes_to_quantize=linear_layers(path),
            weight_type=QuantType.QInt8,
            use_external_data_format=True,
        )


def to_static_int8(source: Path, target: Path, inputs: Any, ranges: Path) -> None:
    """Quantise a graph with ranges of its activations.

    Args:
        source: the graph in fp32.
        target: the file of the quantised graph.
        inputs: ``CalibrationDataReader`` to measure ranges with, which are written; None: ranges
            are read.
        ranges: their file.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    with without_shapes_of_weights(source) as path:
        quantize_static(
            str(path),
            str(target),
            inputs,
            use_external_data_format=True,
            calibration_cache_path=ranges,
            quant_format=QuantFormat.QDQ,
            nodes_to_quantize=linear_layers(path),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
        )


def linear_layers(path: Path) -> list[str]:
    """The nodes that multiply by weights, by name. The output layer stays as it is, as in other
    engines, and so do the products of attention, which have no weights.

    Raises:
        Unsupported: there is none.
    """
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    outputs = {output.name for output in graph.output}
    layers = [
        node.name
        for node in graph.node
        if node.op_type in _QUANTIZED and node.input[1] in weights and node.output[0] not in outputs
    ]
    if not layers:
        raise Unsupported(f"{path} has no linear layer that could be stored in 8 bits")
    return layers


@contextlib.contextmanager
def without_shapes_of_weights(source: Path) -> Iterator[Path]:
    """A copy of a graph that says no shapes of its weights: quantising transposes some of them, and
    would take the old shapes for a contradiction."""
    import onnx

    model = onnx.load(str(source))
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [info for info in model.graph.value_info if info.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    with tempfile.TemporaryDirectory(dir=cache_root()) as directory:
        path = Path(directory) / GRAPH
        _save(model, path)
        yield path


def _save(model: Any, path: Path) -> None:
    import onnx

    onnx.save_model(model, str(path), save_as_external_data=True, location=f"{path.name}.data")
