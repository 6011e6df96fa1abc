"""Compilation: what this process has compiled so far, and compiled code kept on a node's disk.

Counters are read before and after a timed part: a step that met a new graph took seconds that are
no property of the model. torch.compile counts its graphs in every process; a device whose software
compiles as well adds counters of its own (``Device.compilations``).

Compiling a model for a card may take longer than measuring it, so a device whose software keeps
what it compiled gets a directory for that, by the software and the card that made it, on a local
disk under ``NIGHTGRID_COMPILED`` (default ``~/.cache/nightgrid-compiled``). The software itself
keeps each directory below ``NIGHTGRID_COMPILED_MIB``; those unused for a month are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from workloads.base import BadConfiguration


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilations:
    """Compilations of a process up to a moment, or between two."""

    graphs: int | None = None  # None: nobody counts them
    compile_s: float | None = None  # time to make them; None: nobody measures it
    recalled: int | None = None  # graphs that were known, here or on disk; None: nobody counts
    cpu_fallbacks: int | None = None  # operations that a card left to the host
    named: Mapping[str, float] = field(default_factory=dict)  # by the software's own names

    def since(self, earlier: Compilations) -> Compilations:
        """The growth since an earlier reading; counters that did not move are left out."""
        grown = {name: n - earlier.named.get(name, 0) for name, n in self.named.items()}
        return Compilations(
            graphs=_difference(self.graphs, earlier.graphs),
            compile_s=_difference(self.compile_s, earlier.compile_s),
            recalled=_difference(self.recalled, earlier.recalled),
            cpu_fallbacks=_difference(self.cpu_fallbacks, earlier.cpu_fallbacks),
            named={name: n for name, n in grown.items() if n},
        )

    def temperature(self) -> str:
        """Tell if a job had to compile, for its row: cold, or cached where every graph was known.
        Empty where nobody measures how long compiling takes, and where there was no graph."""
        if self.graphs is None or self.compile_s is None:
            return ""
        if not self.graphs:
            return "cached: every graph was known" if self.recalled != 0 else ""
        return f"cold: {self.graphs} graphs compiled in {self.compile_s:.3g} s"

    def told(self) -> str:
        """The counters as one line, for a row."""
        return ", ".join(f"{name} {number:g}" for name, number in sorted(self.named.items()))


_Number = TypeVar("_Number", int, float)


def _difference(now: _Number | None, before: _Number | None) -> _Number | None:
    return None if now is None or before is None else now - before


def of_torch() -> Compilations:
    """The graphs that torch.compile has made here, those of recompilations included; 0 as long as
    nothing was compiled. torch's compiler is not imported for it, which takes seconds."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    graphs = int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
    return Compilations(graphs=graphs, named={"torch_graphs": graphs})


DIRECTORY, SIZE = "NIGHTGRID_COMPILED", "NIGHTGRID_COMPILED_MIB"
_SIZE_MIB = 8192
UNUSED_S = 30 * 86_400.0


def compiled_directory(made_by: str) -> str | None:
    """Directory for code of this software and card, made if need be; None where it cannot be.

    ``made_by`` has versions and card in words; empty: nothing is compiled that could be kept.
    """
    if not made_by:
        return None
    root = Path(os.environ.get(DIRECTORY) or "~/.cache/nightgrid-compiled").expanduser()
    directory = root / re.sub(r"[^A-Za-z0-9._+-]+", "-", made_by)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.utime(directory)
        _remove_unused(root, directory.stat().st_mtime)
    except OSError:
        return None  # code is compiled anew, no more
    return str(directory.absolute())


def size_mib() -> int:
    """Size limit of each directory of a kind of process, in MiB.

    Raises:
        BadConfiguration: ``NIGHTGRID_COMPILED_MIB`` is no whole number above 0.
    """
    told = os.environ.get(SIZE, "")
    if told and (not told.isdecimal() or int(told) < 1):
        raise BadConfiguration(f"{SIZE}={told!r} is not a size; give a whole number of MiB from 1")
    return int(told or _SIZE_MIB)


def _remove_unused(root: Path, now: float) -> None:  # as the disk's own clock has it
    """Remove directories of releases and cards that no process has been started with for long."""
    for directory in root.iterdir():
        with contextlib.suppress(OSError):
            old = now - directory.stat().st_mtime > UNUSED_S
            if old and directory.is_dir() and not directory.is_symlink():
                shutil.rmtree(directory, ignore_errors=True)
