"""One graph in ONNX Runtime, whose inputs and outputs are torch tensors that are never copied.

Inputs are bound to the memory that torch holds, and outputs are read from the memory that ONNX
Runtime has allocated (IOBinding), so a key/value cache that goes through a graph at each step stays
where it is. No library of custom operators is ever registered: it would be code of strangers.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workloads.base import BadConfiguration, DataMissing, Unsupported
from workloads.devices.base import Device
from workloads.engines.onnxruntime import PROVIDERS

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
