"""Finds declarations: the ``SPEC`` of every file in a folder, and those of other packages.

A file ``NAME.py`` in such a folder declares one thing in its ``SPEC``, whose name is the file's
(most folders have ``-`` for ``_``); ``base.py`` is the seam that they share, and folders inside
hold what is too large for one file. So a name is looked up by importing one small file. Another
installed package names its spec under an entry point; it is looked for only where a name is not one
of ours, or all names are wanted, since that reads a file of every package that is installed.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

_LOG = logging.getLogger("nightgrid.declared")
_SEAM = "base"


class Declared(Mapping[str, T], Generic[T]):
    """The specs of a folder's files and of other packages, by name; ours are never replaced."""

    def __init__(self, folder: str, kind: type, group: str, *, separator: str = "-") -> None:
        """
        Args:
            folder: the package that holds the files, e.g. ``workloads.engines``.
            kind: the class of the specs; a spec may also be a class that is derived from it.
            group: the entry points of other packages, e.g. ``nightgrid.engines``.
            separator: stands between the words of a name, where a file's name has ``_``.
        """
        self._separator = separator
        self._folder = folder
        self._kind = kind
        self._group = group
        self._loaded: dict[str, T] = {}

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The names declared in the folder, in alphabetical order."""
        path = importlib.import_module(self._folder).__path__
        found = (m.name for m in pkgutil.iter_modules(path) if not m.ispkg and m.name != _SEAM)
        return tuple(sorted(name.replace("_", self._separator) for name in found))

    @cached_property
    def _others(self) -> dict[str, T]:
        return {
            name: cast("T", spec)
            for name, spec in installed(self._group, self._kind).items()
            if name not in self.own
        }

    def known(self) -> tuple[T, ...]:
        """Ours, and those of other packages if they have been looked for already."""
        return tuple(self[name] for name in (*self.own, *self.__dict__.get("_others", ())))

    def __getitem__(self, name: str) -> T:
        if name not in self.own:
            return self._others[name]
        if name not in self._loaded:
            module = importlib.import_module(f"{self._folder}.{name.replace(self._separator, '_')}")
            spec = module.SPEC
            if not _is_named(spec, self._kind, name):
                raise TypeError(f"{module.__file__} declares no {self._kind.__name__} named {name}")
            self._loaded[name] = spec
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self._others))

    def __len__(self) -> int:
        return len(self.own) + len(self._others)


def _is_named(spec: object, kind: type, name: str) -> bool:
    """Tell if this is a declaration of a kind, under a name."""
    fits = isinstance(spec, kind) or (isinstance(spec, type) and issubclass(spec, kind))
    return fits and getattr(spec, "name", None) == name


def installed(group: str, kind: type) -> dict[str, Any]:
    """Declarations of other installed packages under an entry point, by name.

    One that is broken must not take all others with it: it is left out, with a warning.
    """
    import importlib.metadata

    found = {}
    what = group.rpartition(".")[2].removesuffix("s")
    for point in importlib.metadata.entry_points(group=group):
        try:
            spec = point.load()
        except Exception as error:
            _LOG.warning("%s %s (%s) is left out: %r", what, point.name, point.value, error)
            continue
        if not _is_named(spec, kind, point.name):
            _LOG.warning("%s %s: %s is no entry of that name", what, point.name, point.value)
            continue
        found[point.name] = spec
    return found
