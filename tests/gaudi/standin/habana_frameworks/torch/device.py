"""The device name ``hpu``, as another name of the CPU."""

import functools
import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .hpu import metrics, recipes

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "hpu":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "hpu" or value.startswith("hpu:")):
        return "cpu"
    return value


class HpuIsCpu(TorchFunctionMode):
    """Every call that names the device ``hpu`` gets the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(_on_cpu(value) for value in args)
        if func is torch.Tensor.index_copy_ and args[0].dtype in _FLOAT8:  # unknown to CPUs
            args[0].view(torch.uint8).index_copy_(args[1], args[2], args[3].view(torch.uint8))
            return args[0]
        return func(*args, **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def install() -> None:
    """For this thread and those it starts: a mode belongs to a thread."""
    HpuIsCpu().__enter__()
    run = threading.Thread.run

    @functools.wraps(run)
    def run_with_mode(self: threading.Thread) -> None:
        with HpuIsCpu():
            run(self)

    threading.Thread.run = run_with_mode  # type: ignore[method-assign]
    autocast = torch.amp.autocast_mode.autocast.__init__

    @functools.wraps(autocast)
    def autocast_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, _on_cpu(device_type), *args, **kwargs)

    torch.amp.autocast_mode.autocast.__init__ = autocast_on_cpu  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment]  # there is one queue


def compile_graph(module: Any, example_inputs: Any, **options: Any) -> Any:
    """The backend ``hpu_backend`` of torch.compile: it runs the captured graph as it is. torch
    does not know it before the bridge is imported."""
    tensors = [each for each in example_inputs if hasattr(each, "dtype")]
    shapes = [(tuple(each.shape), str(each.dtype)) for each in tensors]
    metrics.met_graph(known=recipes.is_known((module.code, shapes)))
    return module.forward
