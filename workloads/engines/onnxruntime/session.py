"""Graphs in ONNX Runtime over torch tensors, without copies (IOBinding), and without libraries of
custom operators, which would be untrusted code."""

from __future__ import annotations

import json
import math
import os
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file

from workloads.base import BadConfiguration, DataMissing, Request, Unsupported
from workloads.data.cache import cached_directory
from workloads.devices.base import Device
from workloads.engines.exports import PROOF, Difference, exported_directory, facts_of
from workloads.engines.onnxruntime import PROVIDERS
from workloads.engines.onnxruntime.export import (
    GRAPH,
    IDENTITY,
    Part,
    export,
    export_options,
    graphs_of,
    in_precision,
    key_of,
    structure_of,
)
from workloads.models import precision as precisions
from workloads.models.loading import ModelSource
from workloads.models.precision import ModelWeights
from workloads.util.contents import fingerprint

#: ONNX's type numbers.
_ELEMENTS = {torch.float32: 1, torch.int32: 6, torch.int64: 7, torch.bool: 9, torch.float16: 10}
_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


def provider_of(device: Device) -> str:
    """A device's provider; raises ``Unsupported`` if this build of ONNX Runtime lacks it."""
    import onnxruntime

    provider, available = PROVIDERS[device.name], onnxruntime.get_available_providers()
    if provider not in available:
        raise Unsupported(
            f"this build of ONNX Runtime has no provider for {device.name}, only "
            f"{', '.join(available)}; on NVIDIA cards install onnxruntime-gpu"
        )
    return provider


class Graph:
    """An open graph, optimised on a ``level`` of ONNX Runtime: none, basic, extended or all."""

    def __init__(
        self, path: Path, device: Device, level: str = "all", written_to: Path | None = None
    ) -> None:
        """Raise ``DataMissing`` if the file is missing, truncated, or of a newer format;
        ``written_to`` is a file for the optimised graph."""
        self._path, self._device, self._level = path, device, level
        self._card = torch.device(device.torch_device)
        self.of_threads: dict[str, str] = {}  # row details that depend on threads
        self._open(written_to)
        self.inputs = {spec.name: _TYPES[spec.type] for spec in self._session.get_inputs()}
        self.outputs = [spec.name for spec in self._session.get_outputs()]

    def _open(self, written_to: Path | None = None) -> None:
        import onnxruntime

        began = time.perf_counter()
        # Threads may spin only if no other worker needs the cores.
        spins = torch.get_num_threads() >= (os.cpu_count() or 1)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()  # it does not read OMP_NUM_THREADS
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
        level = self._level.upper()
        name = "ORT_DISABLE_ALL" if level == "NONE" else f"ORT_ENABLE_{level}"
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, name)
        options.log_severity_level = 3  # a warning for each node that stays on the host
        if written_to is not None:
            options.optimized_model_filepath = str(written_to)
            options.add_session_config_entry(  # a file of graphs has 2 GB at most
                "session.optimized_model_external_initializers_file_name", f"{written_to.name}.data"
            )
        provider: Any = provider_of(self._device)
        if self._card.type != "cpu":
            provider = (provider, {"device_id": str(self._card.index or 0)})
        try:
            self._session = onnxruntime.InferenceSession(
                str(self._path), options, providers=[provider]
            )
        except Exception as error:  # the library's own classes, by release
            text = str(error).splitlines()[0]
            raise DataMissing(f"ONNX Runtime cannot open {self._path}: {text:.500}") from error
        self.start_s = time.perf_counter() - began
        self.of_threads["spinning"] = "allowed" if spins else "off"

    @property
    def threads(self) -> int:
        """Threads of the open session."""
        return int(self._session.get_session_options().intra_op_num_threads)

    def take_threads(self) -> None:
        """Reopen the graph if the number of threads has changed; a session's is fixed."""
        if self.threads != torch.get_num_threads():
            self._open()

    def shape(self, name: str) -> tuple[int | None, ...]:
        """Shape of an input; None for dynamic axes."""
        (spec,) = (each for each in self._session.get_inputs() if each.name == name)
        # Sizes inferred at export are strings of digits.
        return tuple(int(size) if str(size).isdigit() else None for size in spec.shape)

    def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the graph; outputs by name, on the card. ``BadConfiguration`` for wrong inputs."""
        if self.inputs.keys() != tensors.keys():
            raise BadConfiguration(
                f"the graph takes {sorted(self.inputs)} and was given {sorted(tensors)}"
            )
        binding = self._session.io_binding()
        bound = []  # alive until the run is over
        for name, value in tensors.items():
            dtype = self.inputs[name]
            # Every provider reads shapes and indices on the host.
            place = self._card if dtype.is_floating_point else torch.device("cpu")
            tensor = value.to(place, dtype).contiguous()
            # ONNX Runtime refuses the null address of an empty tensor.
            memory = tensor if tensor.numel() else tensor.new_empty(1)
            bound.append(memory)
            binding.bind_input(
                name,
                place.type,
                place.index or 0,
                _ELEMENTS[dtype],
                list(tensor.shape),
                memory.data_ptr(),
            )
        for name in self.outputs:
            binding.bind_output(name, self._card.type, self._card.index or 0)
        self._device.synchronize()  # ONNX Runtime has a stream of its own
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        outputs = [torch.from_dlpack(value) for value in binding.get_outputs()]
        return dict(zip(self.outputs, outputs, strict=True))


def operators_of(*paths: Path) -> Counter[str]:
    """Count nodes by operator, subgraphs and functions included."""
    counts: Counter[str] = Counter()

    def count(nodes: Any) -> None:
        for node in nodes:
            prefix = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
            counts[prefix + node.op_type] += 1
            for attribute in node.attribute:
                for graph in (attribute.g, *attribute.graphs):
                    count(graph.node)

    for model in map(structure_of, paths):
        for graph in (model.graph, *model.functions):
            count(graph.node)
    return counts


def listed(operators: Mapping[str, int]) -> str:
    """Counts as text, most frequent first."""
    ordered = sorted(operators.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered)


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Operators whose counts differ, as text: ``Add 12 → 4``."""
    pairs = ((n, before.get(n, 0), after.get(n, 0)) for n in sorted({*before, *after}))
    return ", ".join(f"{name} {old} → {new}" for name, old, new in pairs if old != new)


def share_in(paths: Iterable[Path], *types: str) -> float:
    """Share of weights stored in these ONNX types."""
    import onnx

    numbers = {getattr(onnx.TensorProto, name) for name in types}
    counts = {True: 0, False: 0}
    for path in paths:
        for tensor in structure_of(path).graph.initializer:
            counts[tensor.data_type in numbers] += math.prod(tensor.dims)
    return counts[True] / max(sum(counts.values()), 1)


_COUNTS = "operators.json"


def _operators_run(directory: Path, device: Device, level: str) -> dict[str, int]:
    """Nodes by operator after ONNX Runtime's optimisation, cached by level."""

    def count(to: Path) -> None:
        names = graphs_of(directory)
        for name in names:
            Graph(directory / name, device, level, written_to=to / name)
        counts = dict(operators_of(*(to / name for name in names)))
        for file in to.iterdir():  # copies of the weights
            file.unlink()
        (to / _COUNTS).write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", "utf-8")

    key = key_of("operators", directory.name, level, provider_of(device))
    text = (cached_directory(key, count) / _COUNTS).read_text(encoding="utf-8")
    counts: dict[str, int] = json.loads(text)
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A torch model ready for export."""

    parts: Mapping[str, Part]  # by the graph's file; ``GRAPH`` is the last one
    proof: Mapping[str, torch.Tensor]  # a padded batch, and torch's outputs
    facts: Mapping[str, Any]


Graphs: TypeAlias = "Mapping[str, Graph]"
#: Runs graphs on a proof's batch and compares outputs.
Compare: TypeAlias = Callable[[Graphs, Mapping[str, torch.Tensor]], Difference]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model's open graphs, and facts about them."""

    graphs: Graphs
    directory: Path
    facts: Mapping[str, Any]  # of the export
    weights: ModelWeights
    figures: Mapping[str, float]
    details: Mapping[str, str]

    @property
    def graph(self) -> Graph:
        """The main graph."""
        return self.graphs[GRAPH]

    def details_with(self, **more: str) -> Mapping[str, str]:
        """Details of the row; those of threads follow a reopened session."""
        return ChainMap(self.graph.of_threads, {"attention": "sdpa", **more, **self.details})


def open_graphs(
    request: Request,
    device: Device,
    source: ModelSource,
    kind: str,
    prepare: Callable[[], Exported],
    compare: Compare,
) -> Opened:
    """Open a model's graphs in the job's precision, exported if missing, and check their outputs.
    ``kind`` is part of the cache's keys. BadConfiguration if a graph's outputs differ from torch's.
    """
    import onnxruntime

    support = precisions.require(request.precision, device.name, request.engine)
    settings = request.settings
    options = export_options(settings, device.name)
    key = key_of(kind, fingerprint(Path(source.path)), options)

    def build(directory: Path) -> dict[str, Any]:
        exported = prepare()
        proof = {name: tensor.contiguous() for name, tensor in exported.proof.items()}
        save_file(proof, directory / PROOF)
        facts = {**exported.facts, "graphs": list(exported.parts), IDENTITY: key}
        for name, part in exported.parts.items():
            facts |= export(part, options, directory / name)
        plain = {name: Graph(directory / name, device, "basic") for name in exported.parts}
        compare(plain, proof).check("fp32", directory / GRAPH)
        return facts

    base = exported_directory(key, build)
    level = str(settings.get("graph_optimization") or "all")
    directory = in_precision(base, request.precision, str(settings.get("calibration") or ""))
    names = graphs_of(base)
    graphs = {name: Graph(directory / name, device, level) for name in names}
    difference = compare(graphs, load_file(directory / PROOF))
    difference.check(request.precision, directory / GRAPH)
    paths, facts = [directory / name for name in names], facts_of(directory)
    weight_bytes = sum(
        file.stat().st_size
        for path in paths
        for file in (path, path.with_name(f"{path.name}.data"))
        if file.is_file()
    )
    exported = operators_of(*(base / name for name in names))
    stored, run = operators_of(*paths), _operators_run(directory, device, level)
    share = share_in(paths, "INT8", "UINT8")
    opsets = structure_of(directory / GRAPH).opset_import
    details = {
        "onnxruntime_version": onnxruntime.__version__,
        "providers": provider_of(device),
        "graph_optimization": level,
        "opset": max((each.version for each in opsets if each.domain == ""), default=0),
        "operators_exported": listed(exported),
        "operators_run": listed(run),
        "operators_passed_by_slices": facts.get("operators_passed_by_slices"),
        "operators_changed_by_precision": changes(exported, stored),
        "operators_changed_by_optimization": changes(stored, run),
    }
    return Opened(
        graphs=graphs,
        directory=directory,
        facts=facts,
        weights=ModelWeights(
            weight_bytes=weight_bytes,
            parameter_count=int(facts["parameter_count"]),
            quantized_share=share,
            detail=support.means + f"; {share:.0%} of the weights, the rest in fp32" * bool(share),
        ),
        figures={
            "export_s": float(facts["export_s"]),
            "session_start_s": sum(graph.start_s for graph in graphs.values()),
            "graph_bytes": float(weight_bytes),
            "graph_nodes_exported": float(sum(exported.values())),
            "graph_nodes_run": float(sum(run.values())),
            "largest_output_difference": difference.largest,
            "output_spread": difference.spread,
        },
        details={name: str(value) for name, value in details.items() if value not in (None, "")},
    )
