"""Variants of an exported graph in other precisions, in the node's cache.

fp16 converts weights and operators. int8 stores linear layers' matrices in 8 bits: dynamic takes
activation ranges at run time; static writes calibrated ones (``calibration.py``) into the graph as
QDQ operators, which ONNX Runtime turns into integer products.
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
#: Fact that is equal on all nodes for the same weights; directory names depend on paths and times.
IDENTITY = "identity"
_RECIPE = 2  # part of the cache's keys; raise it when exports change
_PACKAGES = ("torch", "transformers", "diffusers", *(package.name for package in SPEC.packages))
_QUANTIZED = ("MatMul", "Gemm")


def key_of(kind: str, *parts: object) -> str:
    """Cache key of these parts and the installed package versions."""
    return f"onnx-{kind}-{digest(_RECIPE, kind, package_versions(_PACKAGES), *parts)}"


def graphs_of(directory: Path) -> list[str]:
    """The files of the graphs in a directory."""
    return list(facts_of(directory).get("graphs", [GRAPH]))


def in_precision(base: Path, precision: str, calibration: str) -> Path:
    """Directory of a graph in a precision, from its fp32 directory ``base``; int8 is static with
    the name of a calibration, else dynamic.

    Raises:
        DataMissing: there is no such calibration.
        BadConfiguration: it belongs to another graph.
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
    """Directory of a variant, with the facts of its base."""

    def build(directory: Path) -> None:
        for name in graphs_of(base):
            write(base / name, directory / name)
        write_facts(directory, facts_of(base))
        shutil.copy(base / PROOF, directory / PROOF)

    return cached_directory(key_of(kind, base.name, *parts), build)


def _to_fp16(source: Path, target: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    # By path: shape inference in memory is limited to 2 GB, weights included.
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
    """Quantise an fp32 graph. ``inputs`` is a ``CalibrationDataReader`` to measure activations with
    and write the file ``ranges``; None: read that file."""
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
    """Names of the nodes that multiply by weights, without the output layer, as in other engines.

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
    """A copy of a graph without shapes of weights: quantisation transposes some weights and would
    find the old shapes contradictory."""
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
