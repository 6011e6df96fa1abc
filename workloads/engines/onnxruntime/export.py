"""Export models as graphs with transformers' exporter. Samples need rows of unequal length: a batch
of one would be fixed in the graph, and a mask of ones dropped from its inputs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workloads.base import Unsupported

if TYPE_CHECKING:
    import onnx_ir


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Export options; in the cache's keys."""

    constant_folding: bool
    fusions: Any  # device kind of the fused operators, "" for none
    reordering: bool

    @staticmethod
    def of(settings: Mapping[str, Any], device: str) -> Options:
        """Options from an engine's settings."""
        return Options(
            constant_folding=bool(settings.get("constant_folding", True)),
            fusions=device if settings.get("fusions") else "",
            reordering=bool(settings.get("reordering", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A torch module that becomes one graph, and sample arguments of its forward pass."""

    module: Any
    inputs: Mapping[str, Any]
    varying: Mapping[str, tuple[int, ...]]  # dynamic axes by input, for all tensors of a cache
    dropped: str = ""  # drop outputs with this in their names


def export(part: Part, options: Options, path: Path) -> dict[str, Any]:
    """Write a graph and, in a file beside it, its weights; return facts about it.

    Raises:
        Unsupported: transformers has no exporter, or cannot export this model.
    """
    try:
        from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
    except ImportError as error:
        raise Unsupported(
            "this release of transformers exports no ONNX graphs; install 5.23 or newer"
        ) from error
    import onnx_ir

    config = OnnxConfig(
        dynamic=True,
        dynamic_shapes=_shapes(part),
        optimize=options.constant_folding,
        ort_fusions=options.fusions or None,
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
    if options.reordering:
        facts["operators_passed_by_slices"] = move_slices_forward(program)
    onnx_ir.save(program, str(path), external_data=f"{path.name}.data")
    return facts


def _shapes(part: Part) -> dict[str, Any]:
    """Dynamic axes in the form of ``torch.export``."""
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    register_cache_pytrees_for_model(part.module)
    return {
        name: _axes(value, part.varying.get(name, ()))
        for name, value in part.inputs.items()
        if not isinstance(value, bool)  # output flags, which the exporter removes
    }


def _axes(value: Any, varying: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(varying, torch.export.Dim.AUTO)
    node = torch.utils._pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    return [_axes(child, varying) for child in node.flatten_fn(value)[0]]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters' messages about each operator."""
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
        if before is None or not _has_one_reader(before):
            continue
        position = _input_to_cut(before, _axes_of_slice(node))
        if position is not None:
            _swap(graph, before, node, position)
            return True
    return False


def _has_one_reader(node: onnx_ir.Node) -> bool:
    """Return whether exactly one other node reads a node's output."""
    output = node.outputs[0]
    return len(node.outputs) == 1 and not output.is_graph_output() and len(output.uses()) == 1


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
