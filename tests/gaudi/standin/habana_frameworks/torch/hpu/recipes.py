"""Compiled graphs on disk, as ``PT_HPU_RECIPE_CACHE_CONFIG`` asks: here a recipe is an empty file.

Its name is a hash over the graph with the types and shapes of its tensors, as the bridge's is, so
that processes of other nights find what this one has compiled.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

_known: set[str] = set()  # in this process


def is_known(graph: Any) -> bool:
    """Tell if a graph was compiled before, here or by a process with the same cache; it is now."""
    name = hashlib.sha256(repr(graph).encode()).hexdigest()
    if name in _known:
        return True
    _known.add(name)
    directory = os.environ.get("PT_HPU_RECIPE_CACHE_CONFIG", "").partition(",")[0]
    if not directory or not Path(directory).is_dir():
        return False
    try:
        (Path(directory) / name).touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


def structure(module: Any) -> Any:
    """A module's class with the shapes and types of its tensors."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    sizes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    return type(module).__name__, sorted(sizes)
