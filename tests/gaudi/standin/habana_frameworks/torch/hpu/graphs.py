"""HPU graphs as a pipeline of the library captures them: what was done between begin and end of a
capture is done again, on the same tensors, at each replay."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from . import metrics

captured = replayed = 0  # for tests


class _Recorder(TorchDispatchMode):
    """Notes every operation with the tensors it was given, and those that it made."""

    def __init__(self, steps: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        self._steps.append((func, args, kwargs, made))
        return made


class HPUGraph:
    """A captured graph. As on a card, nothing but tensors can change between replays."""

    def __init__(self) -> None:
        self._steps: list[tuple[Any, ...]] = []
        self._recorder: _Recorder | None = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        global captured
        captured += 1
        metrics.met_graph(known=False)
        self._recorder = _Recorder(self._steps)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)

    def replay(self, *_: Any, **__: Any) -> None:
        global replayed
        replayed += 1
        metrics.met_graph(known=True)
        for func, args, kwargs, made in self._steps:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(made)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class CachedParams:
    def __init__(self, graph_inputs: Any, graph_outputs: Any, graph: Any = None) -> None:
        self.graph_inputs = graph_inputs
        self.graph_outputs = graph_outputs
        self.graph = graph


def input_hash(value: Any) -> int:
    """Equal for inputs that one graph serves."""
    if isinstance(value, dict):
        return input_hash(tuple(value.items()))
    if isinstance(value, (list, tuple)):
        return hash(tuple(map(input_hash, value)))
    if isinstance(value, torch.Tensor):
        return hash((tuple(value.shape), value.dtype))
    return hash(value)


def copy_to(target: Any, source: Any) -> None:
    """The numbers of all tensors, into those that a graph was captured with."""
    if isinstance(target, dict):
        for name in target:
            copy_to(target[name], source[name])
    elif isinstance(target, (list, tuple)):
        for one, other in zip(target, source, strict=True):
            copy_to(one, other)
    elif isinstance(target, torch.Tensor):
        target.copy_(source)
