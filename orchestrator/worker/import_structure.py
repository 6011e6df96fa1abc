"""The facts that transformers reads out of its own files at every import, kept on disk.

To offer each model's classes by name, ``import transformers`` reads the source of all its models:
2,500 files, a quarter of a second. What it finds depends on those files alone, so it is looked up
by their names, sizes and times, and read anew where one has changed. It is kept as JSON, among what
else a node makes once (``workloads/cache.py``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from workloads.cache import cached_directory
from workloads.errors import DataMissing

_MODULE = "transformers.utils.import_utils"
_READS = "create_import_structure_from_path"
_FILE = "structure"


@contextlib.contextmanager
def kept_import_structure() -> Iterator[None]:
    """Have transformers look it up, if it is imported within the block for the first time."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the module that reads the files as it would be found, and changes its function."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return None
        load = loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            reads = getattr(module, _READS, None)
            if reads is not None:  # else another version of transformers does without
                setattr(module, _READS, _looking_up(reads, Path(str(module.__file__))))

        loader.exec_module = load_and_change  # type: ignore[method-assign]  # of this one alone
        return spec


def _looking_up(reads: Callable[[Any], Any], reader: Path) -> Callable[[Any], Any]:
    """The function as it is called for all models, a directory or the file in it; as it was for
    anything else."""
    models = reader.parent.parent / "models"
    all_models = (models, models / "__init__.py")
    look_up = functools.cache(lambda: structure_of(models, reader, reads))

    @functools.wraps(reads)
    def read(path: Any) -> Any:
        # Each caller may change what it gets, as it might after a call of the function itself.
        return copy.copy(look_up()) if Path(path) in all_models else reads(path)

    return read


def structure_of(models: Path, reader: Path, reads: Callable[[Any], Any]) -> Any:
    """The result of ``reads`` for a directory, from the cache where it has been there before.

    Args:
        reader: the file in which ``reads`` is defined; its own changes count, too.
    """
    try:
        key = f"import-structure-{_state_of(models, reader)}"
        kept = cached_directory(key, lambda aside: _keep(reads(models), aside / _FILE))
        return of_json(json.loads((kept / _FILE).read_text()))
    except (OSError, DataMissing, ValueError, TypeError, RecursionError):
        return reads(models)  # as without this module


def _keep(structure: Any, file: Path) -> None:
    file.write_text(json.dumps(as_json(structure)))


def as_json(value: Any) -> Any:
    """A structure of dictionaries, sets and strings as JSON, in which keys are strings only.

    Raises:
        TypeError: there is something else in it.
    """
    if type(value) is str:
        return value
    if type(value) is dict:
        return {"dict": [[as_json(key), as_json(item)] for key, item in value.items()]}
    if type(value) in (set, frozenset):
        return {type(value).__name__: [as_json(item) for item in value]}
    raise TypeError(f"a {type(value).__name__} cannot be kept")


def of_json(value: Any) -> Any:
    """The structure that ``as_json`` made this of.

    Raises:
        ValueError: it made nothing like this.
        TypeError: likewise.
    """
    if type(value) is str:
        return value
    if type(value) is not dict:
        raise TypeError("neither a string nor a named collection")
    ((kind, items),) = value.items()
    if kind == "dict":
        return {of_json(key): of_json(item) for key, item in items}
    if kind in ("set", "frozenset"):
        found = {of_json(item) for item in items}
        return found if kind == "set" else frozenset(found)
    raise ValueError(f"no collection is called {kind!r}")


def _state_of(models: Path, reader: Path) -> str:
    """A digest of the names, sizes and times of all files that are read."""
    stat = reader.stat()
    seen: list[object] = [str(reader), stat.st_mtime_ns, stat.st_size]
    seen += sorted(_files_below(str(models)))
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:32]


def _files_below(directory: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield entry.path, 0, 0
                yield from _files_below(entry.path)
            elif entry.name.endswith(".py"):
                stat = entry.stat()
                yield entry.path, stat.st_mtime_ns, stat.st_size
