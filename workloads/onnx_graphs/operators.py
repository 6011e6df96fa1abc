"""Counts of a graph's nodes by operator: they show what folding, fusion and rewriting did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def operators_of(*paths: Path) -> Counter[str]:
    """Nodes of graphs by operator, those of inner graphs and functions included."""
    import onnx

    found: Counter[str] = Counter()
    for path in paths:
        model = onnx.load(str(path), load_external_data=False)
        for graph in (model.graph, *model.functions):
            _count(graph.node, found)
    return found


def _count(nodes: Any, found: Counter[str]) -> None:
    for node in nodes:
        own = node.domain in ("", "ai.onnx")
        found[node.op_type if own else f"{node.domain}.{node.op_type}"] += 1
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _count(graph.node, found)


def told(operators: Mapping[str, int]) -> str:
    """The counts as text, the most frequent first."""
    ordered = sorted(operators.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered)


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The operators whose number differs, as text: ``Add 12 → 4``."""
    names = sorted({*before, *after})
    pairs = ((name, before.get(name, 0), after.get(name, 0)) for name in names)
    return ", ".join(f"{name} {old} → {new}" for name, old, new in pairs if old != new)


def stored_bytes(path: Path) -> int:
    """Bytes of a graph with the weights beside it."""
    data = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (data.stat().st_size if data.is_file() else 0)


def share_in(paths: Iterable[Path], *types: str) -> float:
    """Share of the weights of graphs that are stored in these types of numbers."""
    import onnx

    wanted = {getattr(onnx.TensorProto, name) for name in types}
    sizes: dict[bool, int] = {True: 0, False: 0}
    for path in paths:
        for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
            sizes[tensor.data_type in wanted] += math.prod(tensor.dims)
    return sizes[True] / max(sum(sizes.values()), 1)


def opset_of(path: Path) -> int:
    """Version of ONNX's own operators that a graph is written in."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    versions: list[int] = [each.version for each in model.opset_import if each.domain == ""]
    return max(versions, default=0)
