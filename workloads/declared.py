"""Finds declarations: specs of this program's files, and those of other installed packages.

A spec is looked up by its name, and only the file that declares it is imported. Another package
names its spec under an entry point; these are looked for only where a name is not one of ours, or
all names are wanted, since that reads a file of every package that is installed.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LOG = logging.getLogger("nightgrid.declared")
_NO_SPEC = "base"


class Declared(Mapping[str, T], Generic[T]):
    """Specs of one kind by name: ours, then those of other packages, which never replace ours."""

    def __init__(
        self,
        where: str | Mapping[str, str],
        kind: type | str,
        group: str,
        *,
        separator: str = "-",
    ) -> None:
        """
        Args:
            where: a package, each of whose files but ``base.py`` has a ``SPEC`` under its own name;
                a module with several ``SPECS``; or the module of each name.
            kind: the class of the specs, or "module:Class"; a spec may also be a class derived from
                it.
            group: the entry points of other packages, e.g. ``nightgrid.engines``.
            separator: stands between the words of a name, where a file's name has ``_``.
        """
        self._where = where
        self._kind_or_name = kind
        self._group = group
        self._separator = separator
        self._loaded: dict[str, T] = {}

    @cached_property
    def _kind(self) -> type:
        return as_class(self._kind_or_name)

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        """The module of each of our names."""
        if not isinstance(self._where, str):
            return self._where
        module = importlib.import_module(self._where)
        if not hasattr(module, "__path__"):
            return {spec.name: self._where for spec in module.SPECS}
        files = (m.name for m in pkgutil.iter_modules(module.__path__) if not m.ispkg)
        named = {
            file.replace("_", self._separator): f"{self._where}.{file}"
            for file in files
            if file != _NO_SPEC
        }
        return dict(sorted(named.items()))

    @property
    def own(self) -> tuple[str, ...]:
        """The names that this program declares."""
        return tuple(self._modules)

    @cached_property
    def _others(self) -> dict[str, T]:
        found = installed(self._group, self._kind)
        return {name: spec for name, spec in found.items() if name not in self._modules}

    def known(self) -> tuple[T, ...]:
        """Ours, and those of other packages if they have been looked for already."""
        return tuple(self[name] for name in (*self.own, *self.__dict__.get("_others", ())))

    def __getitem__(self, name: str) -> T:
        if name not in self._modules:
            return self._others[name]
        if name not in self._loaded:
            module = importlib.import_module(self._modules[name])
            specs = module.SPECS if hasattr(module, "SPECS") else (module.SPEC,)
            matching = [spec for spec in specs if _is_named(spec, self._kind, name)]
            if not matching:
                raise TypeError(f"{module.__file__} declares no {self._kind.__name__} named {name}")
            self._loaded[name] = matching[0]
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self._others))

    def __len__(self) -> int:
        return len(self.own) + len(self._others)


def as_class(kind: type | str) -> type:
    """The class of a "module:Class"."""
    if isinstance(kind, type):
        return kind
    module, _, name = kind.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def _is_named(spec: object, kind: type, name: str) -> bool:
    """Tell if this is a declaration of a kind, under a name."""
    fits = isinstance(spec, kind) or (isinstance(spec, type) and issubclass(spec, kind))
    return fits and getattr(spec, "name", None) == name


def installed(group: str, kind: type) -> dict[str, Any]:
    """Declarations of other installed packages under an entry point, by name.

    One that is broken must not take all others with it: it is left out, with a warning.
    """
    import importlib.metadata

    specs = {}
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
        specs[point.name] = spec
    return specs
