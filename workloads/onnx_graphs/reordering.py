"""Moves slices forward: what would be cut off after an operator is cut off before it.

ONNX Runtime moves none on any level. It is valid over operators that compute each element from the
elements at the same place: over those of one input always, over those of several where the others
do not vary along the axes that are cut, over a batch norm where its channels are not cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

#: Operators that compute each element of their output from one element of each input.
ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "Cast", "Ceil", "Clip", "Cos", "Div", "Elu", "Erf", "Exp", "Floor", "Gelu"),
        *("HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow"),
        *("Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub"),
        *("Tanh", "Where"),
    }
)
_CHANNELS = 1


def move_slices_forward(model: onnx_ir.Model) -> int:
    """Move every slice as far forward as it may go, in place; how many operators were passed."""
    passed = 0
    while _pass_one(model.graph):
        passed += 1
    return passed


def _pass_one(graph: onnx_ir.Graph) -> bool:
    """Move one slice before the operator that it follows, if there is such a pair."""
    for node in graph:
        if node.op_type != "Slice" or node.domain not in ("", "ai.onnx"):
            continue
        before = node.inputs[0].producer() if node.inputs[0] is not None else None
        if before is None or not _alone(before):
            continue
        position = _followed(before, _axes(node))
        if position is not None:
            _swap(graph, before, node, position)
            return True
    return False


def _alone(node: onnx_ir.Node) -> bool:
    """Tell if nothing but one other node reads what a node computes."""
    output = node.outputs[0]
    return len(node.outputs) == 1 and not output.is_graph_output() and len(output.uses()) == 1


def _axes(node: onnx_ir.Node) -> list[int] | None:
    """The axes that a slice cuts, counted from the front; None where they are not known."""
    data = node.inputs[0]
    if data is None or data.shape is None:
        return None
    rank = len(data.shape)
    if len(node.inputs) < 4 or node.inputs[3] is None:
        starts = node.inputs[1].const_value if node.inputs[1] is not None else None
        return list(range(starts.size)) if starts is not None else None
    constant = node.inputs[3].const_value
    return [int(axis) % rank for axis in constant.numpy()] if constant is not None else None


def _followed(node: onnx_ir.Node, axes: list[int] | None) -> int | None:
    """Position of the input of a node that can be cut instead of its output; None where that would
    compute something else, or where several would have to be cut."""
    output = node.outputs[0]
    if axes is None or output.shape is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "BatchNormalization":
        return None if _CHANNELS in axes else 0
    if node.op_type not in ELEMENTWISE:
        return None
    cut = []
    for position, value in enumerate(node.inputs):
        if value is None:
            continue
        varies = _varies(value, output, axes)
        if varies is None:
            return None
        if varies:
            cut.append(position)
    return cut[0] if len(cut) == 1 else None


def _varies(value: onnx_ir.Value, output: onnx_ir.Value, axes: list[int]) -> bool | None:
    """Tell if an input has the output's sizes along the axes, as opposed to one number that is
    spread over them; None where that is not known."""
    if value.shape is None or output.shape is None:
        return None
    missing = len(output.shape) - len(value.shape)
    found = set()
    for axis in axes:
        own = value.shape[axis - missing] if axis >= missing else 1
        whole = output.shape[axis]
        if own == 1 and whole != 1:
            found.add(False)
        elif missing == 0 and own == whole and _known(own):
            found.add(True)
        else:
            return None
    return found.pop() if len(found) == 1 else None


def _known(size: int | onnx_ir.SymbolicDim) -> bool:
    return isinstance(size, int) or size.value is not None


def _swap(graph: onnx_ir.Graph, before: onnx_ir.Node, node: onnx_ir.Node, position: int) -> None:
    """Let a slice come before the operator that it followed, on one input of it."""
    import onnx_ir

    given, result = before.inputs[position], node.outputs[0]
    earlier = onnx_ir.node("Slice", [given, *node.inputs[1:]])
    if given is not None:  # of the result's shape, as ``_varies`` has made sure
        earlier.outputs[0].type = given.type
        earlier.outputs[0].shape = _cut_shape(given, result, _axes(node) or [])
    inputs = list(before.inputs)
    inputs[position] = earlier.outputs[0]
    later = onnx_ir.node(
        before.op_type, inputs, {name: each.value for name, each in before.attributes.items()}
    )
    later.outputs[0].shape, later.outputs[0].type = result.shape, result.type
    graph.insert_after(node, [earlier, later])
    name = result.name
    onnx_ir.convenience.replace_all_uses_with(result, later.outputs[0], replace_graph_outputs=True)
    later.outputs[0].name = name
    graph.remove(node, safe=True)
    graph.remove(before, safe=True)


def _cut_shape(
    given: onnx_ir.Value, result: onnx_ir.Value, axes: list[int]
) -> onnx_ir.Shape | None:
    import onnx_ir

    if given.shape is None or result.shape is None:
        return None
    sizes = enumerate(given.shape)
    return onnx_ir.Shape(result.shape[axis] if axis in axes else size for axis, size in sizes)
