"""Export models as graphs with transformers' exporter. Samples need rows of unequal length: a batch
of one would be fixed in the graph, and a mask of ones dropped from its inputs.

Other precisions are made of the fp32 graph. fp16 converts weights and operators. int8 stores linear
layers' matrices in 8 bits: dynamic takes activation ranges at run time; static writes calibrated
ones (``calibration.py``) into the graph as QDQ operators, which become integer products.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workloads.base import BadConfiguration, Unsupported
from workloads.data.cache import cache_root, cached_directory
from workloads.engines.exports import PROOF, digest, facts_of, package_versions, write_facts
from workloads.engines.onnxruntime import SPEC
from workloads.models.products import find_calibration

if TYPE_CHECKING:
    import onnx_ir


def export_options(settings: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Options of an export from an engine's settings; in the cache's keys."""
    return {
        "constant_folding": bool(settings.get("constant_folding", True)),
        "fusions": device if settings.get("fusions") else "",  # device kind of fused operators
        "reordering": bool(settings.get("reordering", False)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A torch module that becomes one graph, and sample arguments of its forward pass."""

    module: Any
    inputs: Mapping[str, Any]
    varying: Mapping[str, tuple[int, ...]]  # dynamic axes by input, for all tensors of a cache
    dropped: str = ""  # drop outputs with this in their names


def export(part: Part, options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Write a graph and, in a file beside it, its weights; return facts about it. Unsupported if
    transformers has no exporter, or cannot export this model."""
    try:
        from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    except ImportError as error:
        raise Unsupported(
            "this release of transformers exports no ONNX graphs; install 5.23 or newer"
        ) from error
    import onnx_ir

    register_cache_pytrees_for_model(part.module)
    config = OnnxConfig(
        dynamic=True,
        dynamic_shapes={
            name: _axes(value, part.varying.get(name, ()))
            for name, value in part.inputs.items()
            if not isinstance(value, bool)  # output flags, which the exporter removes
        },
        optimize=options["constant_folding"],
        ort_fusions=options["fusions"] or None,
    )
    with _quiet():
        try:
            program = OnnxExporter().export(part.module, dict(part.inputs), config).program
        except Exception as error:  # torch.export's and the exporter's own classes
            text = (str(error).strip() or repr(error)).splitlines()[0]
            raise Unsupported(
                f"{type(part.module).__name__} cannot be exported to ONNX: {text:.300}"
            ) from error
    if part.dropped:
        outputs = program.graph.outputs
        outputs[:] = [output for output in outputs if part.dropped not in (output.name or "")]
    facts = {}
    if options["reordering"]:
        facts["operators_passed_by_slices"] = move_slices_forward(program)
    onnx_ir.save(program, str(path), external_data=f"{path.name}.data")
    return facts


def _axes(value: Any, varying: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(varying, torch.export.Dim.AUTO)
    node = torch.utils._pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    return [_axes(child, varying) for child in node.flatten_fn(value)[0]]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    names = ("torch.onnx", "torch._export", "torch.__trace", "transformers")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "Cast", "Ceil", "Clip", "Cos", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu"),
        *("HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow"),
        *("Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub"),
        *("Tanh", "Where"),
    }
)
_CHANNELS = 1


def move_slices_forward(model: onnx_ir.Model) -> int:
    """Move slices as far forward as possible, in place; return the number of operators passed."""
    passed = 0
    while _pass_one(model.graph):
        passed += 1
    return passed


def _pass_one(graph: onnx_ir.Graph) -> bool:
    """Move one slice before the operator that it follows; False if none can be moved."""
    for node in graph:
        if node.op_type != "Slice" or node.domain not in ("", "ai.onnx"):
            continue
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        if before is None or len(before.outputs) != 1:
            continue
        output = before.outputs[0]
        if output.is_graph_output() or len(output.uses()) != 1:
            continue
        position = _input_to_cut(before, _axes_of_slice(node))
        if position is not None:
            _swap(graph, before, node, position)
            return True
    return False


def _axes_of_slice(node: onnx_ir.Node) -> list[int] | None:
    """Axes that a slice cuts, not negative; None if unknown."""
    data = node.inputs[0]
    if data is None or data.shape is None:
        return None
    rank = len(data.shape)
    if len(node.inputs) < 4 or node.inputs[3] is None:
        starts = node.inputs[1].const_value if node.inputs[1] is not None else None
        return list(range(starts.size)) if starts is not None else None
    constant = node.inputs[3].const_value
    return [int(axis) % rank for axis in constant.numpy()] if constant is not None else None


def _input_to_cut(node: onnx_ir.Node, axes: list[int] | None) -> int | None:
    """Position of the single input that can be cut instead of the output; None if there is none."""
    output = node.outputs[0]
    if axes is None or output.shape is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "BatchNormalization":
        return None if _CHANNELS in axes else 0
    if node.op_type not in _ELEMENTWISE:
        return None
    varying = [
        (position, _varies(value, output, axes))
        for position, value in enumerate(node.inputs)
        if value is not None
    ]
    if any(varies is None for _, varies in varying):
        return None
    cut = [position for position, varies in varying if varies]
    return cut[0] if len(cut) == 1 else None


def _varies(value: onnx_ir.Value, output: onnx_ir.Value, axes: list[int]) -> bool | None:
    """True for the output's sizes along the axes, False if broadcast, None if unknown."""
    if value.shape is None or output.shape is None:
        return None
    missing = len(output.shape) - len(value.shape)
    answers = set()
    for axis in axes:
        own = value.shape[axis - missing] if axis >= missing else 1
        whole = output.shape[axis]
        if own == 1 and whole != 1:
            answers.add(False)
        elif missing == 0 and own == whole and (isinstance(own, int) or own.value is not None):
            answers.add(True)
        else:
            return None
    return answers.pop() if len(answers) == 1 else None


def _swap(graph: onnx_ir.Graph, before: onnx_ir.Node, node: onnx_ir.Node, position: int) -> None:
    """Move a slice before the operator that it followed, onto one of its inputs."""
    import onnx_ir

    value, result = before.inputs[position], node.outputs[0]
    earlier = onnx_ir.node("Slice", [value, *node.inputs[1:]])
    if value is not None:  # has the result's shape (``_varies``)
        earlier.outputs[0].type = value.type
        if value.shape is not None and result.shape is not None:
            cut = _axes_of_slice(node) or []
            earlier.outputs[0].shape = onnx_ir.Shape(
                result.shape[axis] if axis in cut else size for axis, size in enumerate(value.shape)
            )
    inputs = list(before.inputs)
    inputs[position] = earlier.outputs[0]
    attributes = {name: attribute.value for name, attribute in before.attributes.items()}
    later = onnx_ir.node(before.op_type, inputs, attributes)
    later.outputs[0].shape, later.outputs[0].type = result.shape, result.type
    graph.insert_after(node, [earlier, later])
    name = result.name
    onnx_ir.convenience.replace_all_uses_with(result, later.outputs[0], replace_graph_outputs=True)
    later.outputs[0].name = name
    graph.remove(node, safe=True)
    graph.remove(before, safe=True)


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
    the name of a calibration, else dynamic. BadConfiguration if that is of another graph."""
    if precision == "fp32":
        return base
    if precision == "fp16":
        return _made(base, "fp16", _to_fp16)
    if not calibration:
        return _made(base, "int8-dynamic", _to_dynamic_int8)
    ranges, origin = find_calibration(calibration)
    if origin["measured"] != facts_of(base)[IDENTITY]:
        raise BadConfiguration(
            f"calibration {calibration!r} measured another graph ({origin.get('model')}); let a "
            "job of onnx-calibration with this model and these settings of graphs save one"
        )
    return _made(
        base,
        "int8-static",
        lambda source, target: to_static_int8(source, target, None, ranges),
        digest(ranges.read_text(encoding="utf-8")),
    )


def _made(base: Path, kind: str, write: Callable[[Path, Path], None], *parts: str) -> Path:
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


def structure_of(path: Path) -> Any:
    """The ONNX model of a file, without its weights."""
    import onnx

    return onnx.load(str(path), load_external_data=False)


def linear_layers(path: Path) -> list[str]:
    """Names of the nodes that multiply by weights, without the output layer, as in other engines;
    Unsupported if there is none."""
    graph = structure_of(path).graph
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
