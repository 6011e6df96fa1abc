"""A graph as a job runs it: in its precision, opened, compared with torch, and counted."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.base import Request
from workloads.data.cache import cached_directory
from workloads.devices.base import Device
from workloads.models import precision as precisions
from workloads.models.precision import ModelWeights
from workloads.onnx_graphs import operators
from workloads.onnx_graphs.export import GRAPH, facts_of, graphs_of, key_of
from workloads.onnx_graphs.proof import Difference
from workloads.onnx_graphs.session import Execution, Graph
from workloads.onnx_graphs.variants import in_precision

_COUNTS = "operators.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An open graph, its directory, and what is known of it."""

    graph: Graph
    directory: Path
    base: Path  # directory of the graph in fp32, as it was exported
    execution: Execution
    precision: str
    means: str  # what the precision meant

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts that were noted at export."""
        return facts_of(self.directory)

    def told(self, details: Mapping[str, str]) -> Mapping[str, str]:
        """Details of the row, with those of a session that may yet be opened for other threads."""
        return ChainMap(self.graph.of_threads, {"attention": "sdpa", **details})

    def weights(self) -> ModelWeights:
        """Bytes, count and format of the weights, as stored."""
        share = operators.share_in(self._graphs(self.directory), "INT8", "UINT8")
        return ModelWeights(
            weight_bytes=self._bytes(),
            parameter_count=int(self.facts["parameter_count"]),
            quantized_share=share,
            detail=self.means + (f"; {share:.0%} of the weights, the rest in fp32" * bool(share)),
        )

    def also(self, name: str) -> Graph:
        """Another graph of the same directory, opened alike."""
        return Graph(self.directory / name, self.execution)

    def _graphs(self, directory: Path) -> list[Path]:
        return [directory / name for name in graphs_of(self.base)]

    def _bytes(self) -> int:
        return sum(map(operators.stored_bytes, self._graphs(self.directory)))

    def proved(
        self, difference: Difference, *beside: Graph
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Figures and details of the row, once the difference from torch is one of rounding;
        ``beside`` are other graphs of the model, open too. See ``Difference.check``."""
        difference.check(self.precision, self.directory / GRAPH)
        exported = operators.operators_of(*self._graphs(self.base))
        stored = operators.operators_of(*self._graphs(self.directory))
        run = _operators_run(self.directory, self.execution)
        figures = {
            "export_s": float(self.facts["export_s"]),
            "session_start_s": sum(each.start_s for each in (self.graph, *beside)),
            "graph_bytes": float(self._bytes()),
            "graph_nodes_exported": float(sum(exported.values())),
            "graph_nodes_run": float(sum(run.values())),
            **difference.figures(),
        }
        details = {
            **self.execution.details(),
            "opset": str(operators.opset_of(self.directory / GRAPH)),
            "operators_exported": operators.told(exported),
            "operators_run": operators.told(run),
        }
        if "operators_passed_by_slices" in self.facts:
            details["operators_passed_by_slices"] = str(self.facts["operators_passed_by_slices"])
        if stored != exported:
            details["operators_changed_by_precision"] = operators.changes(exported, stored)
        if stored != run:
            details["operators_changed_by_optimization"] = operators.changes(stored, run)
        return figures, details


def open_graph(base: Path, request: Request, device: Device) -> Opened:
    """Open an exported graph as a job asks for it.

    Raises:
        Unsupported: not in this precision, or ONNX Runtime has no provider for this card.
        DataMissing: there is no such calibration, or the file cannot be read.
    """
    support = precisions.require(request.precision, device.name, request.engine)
    settings = request.settings
    execution = Execution(
        device=device, graph_optimization=str(settings.get("graph_optimization") or "all")
    )
    directory = in_precision(base, request.precision, str(settings.get("calibration") or ""))
    return Opened(
        graph=Graph(directory / GRAPH, execution),
        directory=directory,
        base=base,
        execution=execution,
        precision=request.precision,
        means=support.means,
    )


def _operators_run(directory: Path, execution: Execution) -> dict[str, int]:
    """Nodes by operator of a graph as ONNX Runtime runs it, counted once for a level."""
    seen = [directory.name, execution.graph_optimization, execution.provider]

    def count(to: Path) -> None:
        names = graphs_of(directory)
        for name in names:
            Graph(directory / name, execution, written_to=to / name)
        counts = dict(operators.operators_of(*(to / name for name in names)))
        for file in to.iterdir():  # the weights are in it once more
            file.unlink()
        (to / _COUNTS).write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", "utf-8")

    found = cached_directory(key_of("operators", *seen), count)
    counts: dict[str, int] = json.loads((found / _COUNTS).read_text(encoding="utf-8"))
    return counts
