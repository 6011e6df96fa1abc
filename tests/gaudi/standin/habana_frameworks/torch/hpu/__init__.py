"""The device module ``torch.hpu``: one card, its memory the process's."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import graphs, metrics, recipes
from .graphs import HPUGraph
from .random import manual_seed_all

__all__ = ["HPUGraph", "graphs", "manual_seed_all"]

_LIMIT_BYTES = 94_600_000_000

#: Rows of a batch for whose graph the card has workspace; for tests of full memory.
_WORKSPACE_ROWS = "STANDIN_WORKSPACE_ROWS"

_inference = False


def enable_inference_mode() -> None:
    global _inference
    _inference = True


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(*_: Any) -> None: ...


def is_initialized() -> bool:
    return True


def init(*_: Any) -> None: ...


_lazy_init = init


def get_device_name(*_: Any) -> str:
    return "GAUDI2 (stand-in on CPU)"


def synchronize(*_: Any) -> None: ...


def memory_stats(*_: Any) -> dict[str, int]:
    """The bridge's keys; bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    in_use = int(pages) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"Limit": _LIMIT_BYTES, "InUse": in_use, "MaxInUse": max(in_use, peak)}


def memory_allocated(*_: Any) -> int:
    return memory_stats()["InUse"]


def max_memory_allocated(*_: Any) -> int:
    return memory_stats()["MaxInUse"]


def reset_peak_memory_stats(*_: Any) -> None: ...


def wrap_in_hpu_graph(module: Any, *_: Any, **__: Any) -> Any:
    """A module that would be captured and replayed; as with the bridge, only in lazy mode."""
    if os.environ.get("PT_HPU_LAZY_MODE") != "1":
        raise AttributeError("wrap_in_hpu_graph exists in lazy mode only")
    forward = module.forward
    structure = recipes.structure(module)

    def without_the_switch(*args: Any, bypass_hpu_graphs: bool = False, **kwargs: Any) -> Any:
        _take_workspace(kwargs.get("input_ids"))
        known = recipes.is_known((structure, _shapes((args, kwargs)), _inference))
        metrics.met_graph(known=known, inference=_inference)
        return forward(*args, **kwargs)

    module.forward = without_the_switch
    module.clear_inputs = lambda *_: None
    module.clear_cache = lambda *_: None
    return module


def _take_workspace(ids: Any) -> None:
    """Fail as the bridge does where the workspace of a graph does not fit into the card."""
    rows = int(os.environ.get(_WORKSPACE_ROWS, 0))
    if rows and ids is not None and ids.shape[0] > rows:
        size = _LIMIT_BYTES * ids.shape[0] // rows
        raise RuntimeError(
            "[Rank:0] FATAL ERROR :: MODULE:PT_SYNHELPER workspace Allocation of size "
            f"::{size} failed!"
        )


def _shapes(value: Any) -> Any:
    """Shapes of all tensors within a value, and all else that a captured graph is fixed to."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_shapes, value))
    if isinstance(value, dict):
        return tuple((name, _shapes(item)) for name, item in sorted(value.items()))
    if hasattr(value, "shape"):
        return tuple(value.shape), str(value.dtype)
    return value if isinstance(value, (bool, int, str)) else type(value).__name__


class Stream:
    """There is one queue here, and nothing waits in it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...


class Event(Stream):
    """A moment in a queue."""


def current_stream(*_: Any) -> Stream:
    return Stream()


default_stream = current_stream


@contextlib.contextmanager
def stream(_: Stream) -> Iterator[None]:
    yield


@contextlib.contextmanager
def sdp_kernel(*_: Any, **__: Any) -> Iterator[None]:
    yield


def is_autocast_hpu_enabled() -> bool:
    return torch.is_autocast_enabled("cpu")


def get_autocast_hpu_dtype() -> Any:
    return torch.get_autocast_dtype("cpu")


def enable_dynamic_shape() -> None: ...


def disable_dynamic_shape() -> None: ...
