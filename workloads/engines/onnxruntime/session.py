"""One graph in ONNX Runtime, whose inputs and outputs are torch tensors that are never copied.

Inputs are bound to the memory that torch holds, and outputs are read from the memory that ONNX
Runtime has allocated (IOBinding), so a key/value cache that goes through a graph at each step stays
where it is. No library of custom operators is ever registered: it would be code of strangers.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workloads.base import BadConfiguration, DataMissing, Request, Unsupported
from workloads.data.cache import cached_directory
from workloads.devices.base import Device
from workloads.engines.onnxruntime import PROVIDERS
from workloads.engines.onnxruntime.export import GRAPH, facts_of, graphs_of, key_of
from workloads.engines.onnxruntime.variants import in_precision
from workloads.engines.proof import Difference
from workloads.models import precision as precisions
from workloads.models.precision import ModelWeights

_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
#: ONNX's numbers of the types that graphs take and give.
_ELEMENTS = {
    torch.float32: 1,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
}
_TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The way in which graphs are run, as a job's settings and its card say it."""

    device: Device
    graph_optimization: str  # a level of ONNX Runtime: none, basic, extended or all

    @property
    def provider(self) -> str:
        """The provider of this card.

        Raises:
            Unsupported: this build of ONNX Runtime does not have it.
        """
        import onnxruntime

        wanted, there = PROVIDERS[self.device.name], onnxruntime.get_available_providers()
        if wanted not in there:
            raise Unsupported(
                f"this build of ONNX Runtime has no provider for {self.device.name}, only "
                f"{', '.join(there)}; on NVIDIA cards install onnxruntime-gpu"
            )
        return wanted

    @property
    def spins(self) -> bool:
        """Permission for threads to wait in a loop: only where no other worker wants the cores."""
        return torch.get_num_threads() >= (os.cpu_count() or 1)

    def options(self, written_to: Path | None = None) -> Any:
        """Options of a session; ``written_to`` is a file for the optimised graph."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()  # it does not read OMP_NUM_THREADS
        options.inter_op_num_threads = 1
        options.add_session_config_entry(
            "session.intra_op.allow_spinning", "1" if self.spins else "0"
        )
        level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[self.graph_optimization])
        options.graph_optimization_level = level
        options.log_severity_level = 3  # a warning for each node that stays on the host
        if written_to is not None:
            options.optimized_model_filepath = str(written_to)
            options.add_session_config_entry(  # a file of graphs has 2 GB at most
                "session.optimized_model_external_initializers_file_name", f"{written_to.name}.data"
            )
        return options

    def details(self) -> dict[str, str]:
        """Details of the row."""
        import onnxruntime

        return {
            "onnxruntime_version": onnxruntime.__version__,
            "providers": self.provider,
            "graph_optimization": self.graph_optimization,
        }


class Graph:
    """An open graph."""

    def __init__(self, path: Path, execution: Execution, written_to: Path | None = None) -> None:
        """Open a graph.

        Raises:
            DataMissing: its file is missing, cut short, or of a newer format.
        """
        self._path, self._execution = path, execution
        self._card = torch.device(execution.device.torch_device)
        #: Details of the row that follow the threads of the job.
        self.of_threads: dict[str, str] = {}
        self._open(written_to)
        self.inputs = {spec.name: _TYPES[spec.type] for spec in self._session.get_inputs()}
        self.outputs = [spec.name for spec in self._session.get_outputs()]

    def _open(self, written_to: Path | None = None) -> None:
        import onnxruntime

        began, path = time.perf_counter(), self._path
        provider: Any = self._execution.provider
        if self._card.type != "cpu":
            provider = (provider, {"device_id": str(self._card.index or 0)})
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), self._execution.options(written_to), providers=[provider]
            )
        except Exception as error:  # the library's own classes, by release
            text = str(error).splitlines()[0]
            raise DataMissing(f"ONNX Runtime cannot open {path}: {text:.500}") from error
        self.start_s = time.perf_counter() - began
        self.of_threads["spinning"] = "allowed" if self._execution.spins else "off"

    @property
    def threads(self) -> int:
        """Threads that the open session computes with."""
        return int(self._session.get_session_options().intra_op_num_threads)

    def take_threads(self) -> None:
        """Open the graph anew if this job computes with another number of threads than the one
        that it was opened for: a session's number is fixed."""
        if self.threads != torch.get_num_threads():
            self._open()

    def shape(self, name: str) -> tuple[int | None, ...]:
        """The shape of an input; None for each axis that varies."""
        (spec,) = (each for each in self._session.get_inputs() if each.name == name)
        # A size that was found at export, not said, is a number in words.
        return tuple(int(size) if str(size).isdigit() else None for size in spec.shape)

    def __call__(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the graph; outputs by name, on the card.

        Raises:
            BadConfiguration: an input is missing, or one is given that the graph does not take.
        """
        if self.inputs.keys() != tensors.keys():
            raise BadConfiguration(
                f"the graph takes {sorted(self.inputs)} and was given {sorted(tensors)}"
            )
        binding = self._session.io_binding()
        held = []  # alive until the run is over
        for name, given in tensors.items():
            wanted = self.inputs[name]
            # Shapes and indices are read on the host, whatever the provider.
            where = self._card if wanted.is_floating_point else torch.device("cpu")
            tensor = given.to(where, wanted).contiguous()
            # An empty tensor has no address, which is refused; another's stands in.
            kept = tensor if tensor.numel() else tensor.new_empty(1)
            held.append(kept)
            binding.bind_input(
                name,
                where.type,
                where.index or 0,
                _ELEMENTS[wanted],
                list(tensor.shape),
                kept.data_ptr(),
            )
        for name in self.outputs:
            binding.bind_output(name, self._card.type, self._card.index or 0)
        self._execution.device.synchronize()  # ONNX Runtime has a stream of its own
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        found = [torch.from_dlpack(value) for value in binding.get_outputs()]
        return dict(zip(self.outputs, found, strict=True))


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
        share = share_in(self._graphs(self.directory), "INT8", "UINT8")
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
        return sum(map(stored_bytes, self._graphs(self.directory)))

    def proved(
        self, difference: Difference, *beside: Graph
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Figures and details of the row, once the difference from torch is one of rounding;
        ``beside`` are other graphs of the model, open too. See ``Difference.check``."""
        difference.check(self.precision, self.directory / GRAPH)
        exported = operators_of(*self._graphs(self.base))
        stored = operators_of(*self._graphs(self.directory))
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
            "opset": str(opset_of(self.directory / GRAPH)),
            "operators_exported": told(exported),
            "operators_run": told(run),
        }
        if "operators_passed_by_slices" in self.facts:
            details["operators_passed_by_slices"] = str(self.facts["operators_passed_by_slices"])
        if stored != exported:
            details["operators_changed_by_precision"] = changes(exported, stored)
        if stored != run:
            details["operators_changed_by_optimization"] = changes(stored, run)
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
        counts = dict(operators_of(*(to / name for name in names)))
        for file in to.iterdir():  # the weights are in it once more
            file.unlink()
        (to / _COUNTS).write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", "utf-8")

    found = cached_directory(key_of("operators", *seen), count)
    counts: dict[str, int] = json.loads((found / _COUNTS).read_text(encoding="utf-8"))
    return counts


#: Ids of the new positions [rows, new] -> logits of the last one [rows, vocabulary].
Step = Callable[[torch.Tensor], torch.Tensor]


def greedy(
    step: Step,
    ids: torch.Tensor,
    *,
    output_tokens: int,
    end_token_ids: Collection[int],
    pad_token_id: int,
    on_step: Callable[[], None],
    keep_logits: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tokens of each step [rows], and its logits where they are kept. Rows that have ended are
    padded; nothing is computed once all have."""
    ends = torch.tensor(sorted(end_token_ids), dtype=torch.long)
    ended = torch.zeros(len(ids), dtype=torch.bool)
    tokens: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    for _ in range(output_tokens):
        found = step(ids)
        chosen = found.argmax(-1).cpu().masked_fill(ended, pad_token_id)
        tokens.append(chosen)
        if keep_logits:
            logits.append(found)
        on_step()
        ended |= torch.isin(chosen, ends)
        if bool(ended.all()):
            break
        ids = chosen[:, None]
    return tokens, logits
