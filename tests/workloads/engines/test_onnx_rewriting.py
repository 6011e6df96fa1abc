"""Folding, batch-norm replacement and reordering, shown on a small convolution graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")

from hypothesis import given, settings  # noqa: E402 - of what may be missing only the rest needs
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402

from workloads.devices import device_for  # noqa: E402
from workloads.engines.onnxruntime.export import move_slices_forward  # noqa: E402
from workloads.engines.onnxruntime.session import Graph, changes, operators_of  # noqa: E402  # noqa: E402

pytestmark = pytest.mark.slow  # loads the exporter

CHANNELS, SIDE = 4, 16


def weight(name: str, *shape: int) -> onnx.TensorProto:
    drawn = torch.Generator().manual_seed(len(name))
    values = torch.rand(shape, generator=drawn) + 0.5
    return helper.make_tensor(name, TensorProto.FLOAT, shape, values.flatten().tolist())


def whole(name: str, *values: int) -> onnx.TensorProto:
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


def convolution(path: Path, axes: tuple[int, ...] = (2, 3)) -> Path:
    """Convolution, batch norm, an addition of two constants, a product, relu, and a crop."""
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "scale", "shift", "mean", "variance"], ["b"]),
        helper.make_node("Add", ["one", "two"], ["constant"]),
        helper.make_node("Mul", ["b", "constant"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Slice", ["d", "starts", "ends", "axes"], ["y"]),
    ]
    sizes = [2, CHANNELS, SIDE, SIDE]
    found = [3 if axis in axes else size for axis, size in enumerate(sizes)]
    graph = helper.make_graph(
        nodes,
        "convolution",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, found)],
        [
            weight("kernel", CHANNELS, 3, 3, 3),
            *(weight(name, CHANNELS) for name in ("scale", "shift", "mean", "variance")),
            *(weight(name, CHANNELS, 1, 1) for name in ("one", "two")),
            whole("starts", *(1 for _ in axes)),
            whole("ends", *(4 for _ in axes)),
            whole("axes", *axes),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 10
    onnx.save(onnx.shape_inference.infer_shapes(model), str(path))
    return path


def opened(path: Path, level: str = "none") -> tuple[torch.Tensor, Mapping[str, int]]:
    """Output of a graph on a level, and its nodes as they are run."""
    written = path.with_name(f"{level}-{path.name}")
    graph = Graph(path, device_for("cpu"), level, written_to=written)
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
