"""Rows that found no room in their run: written to another disk, and brought home later."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, fragments, identity, paths
from orchestrator.results.complete import refuse_unread
from orchestrator.results.identity import Former
from orchestrator.results.scan import ATTEMPT, scan_rows

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger("nightgrid.store")
#: The columns by which a row is known, whatever stands with it in its record.
_ROW = ("invocation_id", "attempt_id", "recorded_at", "state", "final")


@dataclass(slots=True, kw_only=True)
class SpilledRows:
    """The rows of one run that lie outside its directory, for the run's one writer."""

    run: str
    tables_path: Path
    quarantine_path: Path
    append: Callable[[str, bytes], object]  # a record to the run's log
    rescued: int = 0  # rows recovered
    _places: dict[str, Path] = field(default_factory=dict)  # by the name of the row's file

    def __bool__(self) -> bool:
        """Return whether rows lie elsewhere of which this writer knows."""
        return bool(self._places)

    def write(self, run_id: str, name: str, data: bytes) -> Path | None:
        """Write a row's file on another disk of this host; None if there is no room there."""
        for directory in paths.spill_directories(run_id):
            with contextlib.suppress(OSError, StoreError):
                disk.make_private_directory(directory)
                if disk.is_ours(directory):
                    try:
                        self._places[name] = fragments.write_durably(directory, name, data)
                        return self._places[name]
                    finally:
                        disk.remove_empty_directory(directory)
        return None

    def forget(self, name: str) -> None:
        """Remove the copy of a row that is at home now."""
        if elsewhere := self._places.pop(name, None):
            with contextlib.suppress(OSError):
                disk.remove(elsewhere)
            disk.remove_empty_directory(elsewhere.parent)

    def bring_home(self, run_id: str) -> int:
        """Move the rows that were spilled under a run id into the run; how many came.

        A row of an attempt that another driver took for lost, and whose job went on, is set aside.
        One that is home in another record keeps its copy until that record is Parquet: a log can
        show what no disk has.

        Raises:
            StoreError: one of them, or a file of the run that may have some of them, cannot be read
                now.
        """
        directories = [each for each in paths.spill_directories(run_id) if disk.is_ours(each)]
        if not directories:
            return 0
        scan = scan_rows(self.tables_path, (*ATTEMPT, *_ROW))
        refuse_unread(scan, "which spilled rows are in the run")
        recorded, home = scan.attempts(), {*scan.tables, *scan.covered}
        rows = {row: name for name, table in scan.tables.items() for row in _rows(table)}
        before = self.rescued
        for directory in directories:
            for found in sorted(disk.names(directory)):
                data = _content(directory / found)
                # A power failure can take the renaming of a whole file back.
                unfinished = fragments.partial_target(found)
                name = unfinished or found
                if reason := fragments.damage_of(name, data):
                    if unfinished is not None:  # torn: nobody was told that it is safe
                        disk.make_directory(self.quarantine_path)
                        fragments.write_durably(self.quarantine_path, name, data)
                        disk.remove(directory / found)
                        continue
                    _LOG.warning("not brought home: %s: %s", directory / found, reason)
                    continue  # it stays where it is
                there = name in home
                holder = None if there else rows.get(next(_rows(_table(name, data)), ()))
                if holder is not None:
                    if not fragments.is_record(holder):
                        disk.remove(directory / found)
                    continue
                if fragments.attempt_of(name) in recorded and not there and _is_final(name, data):
                    disk.make_directory(self.quarantine_path)
                    aside = fragments.write_durably(self.quarantine_path, name, data)
                    _LOG.warning("set aside as %s: the attempt has a row", aside)
                else:
                    if fragments.is_record(name):
                        self.append(name, data)
                    else:  # of an earlier version
                        fragments.write_durably(self.tables_path, name, data)
                    self.rescued += 1
                disk.remove(directory / found)
            disk.remove_empty_directory(directory)
        return self.rescued - before

    def adopt(self, run_id: str, former: Sequence[Former]) -> None:
        """Bring home the spilled rows of another run id.

        Raises:
            StoreError: there are none here, or they are another run's.
        """
        for each in former:
            if each.run_id == run_id and identity.has_id(each.path, run_id):
                raise StoreError(
                    f"the rows of run id {run_id} belong to {each.path}, which is there: "
                    "`nightgrid run --resume` of that run moves them back"
                )
        spilled = _spilled_rows(run_id)
        if not spilled:
            places = ", ".join(str(each) for each in paths.spill_directories(run_id))
            raise StoreError(f"no rows of run id {run_id} on this host: looked for {places}")
        if run_id not in {each.run_id for each in former}:
            for path in spilled:
                name = _run_named_in(path)
                if name != self.run:
                    raise StoreError(
                        f"{path} holds a row of run {name!a}, not of {self.run}, and {run_id} is "
                        f"no former id of {self.run}: adopt it in the run that it belongs to"
                    )
        self.bring_home(run_id)

    def told(self, directory: Path, former: Sequence[Former]) -> list[str]:
        """A sentence for each former id of this directory under which rows lie on this host."""
        told = []
        for each in reversed(former):
            if spilled := _spilled_rows(each.run_id):
                places = ", ".join(sorted({str(path.parent) for path in spilled}))
                command = ["nightgrid", "run", "--resume", "--results", str(directory.parent)]
                command += ["--run", self.run, "--adopt", each.run_id]
                told.append(
                    f"{len(spilled)} rows of run id {each.run_id} found no room and lie in "
                    f"{places}; if the directory that they belong to is gone, "
                    f"`{shlex.join(command)}` brings them here"
                )
        return told


def _content(path: Path) -> bytes:
    """The content of a spilled file.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return disk.read(path)
    except OSError as error:
        raise StoreError(
            f"{path} may hold a row of this run that found no room in it, and cannot be read: "
            f"{error.strerror or error}. Try again; if it stays so, move it out of that directory"
        ) from error


def _spilled_rows(run_id: str) -> list[Path]:
    """The files of rows that were spilled under a run id on this host."""
    return [
        directory / name
        for directory in paths.spill_directories(run_id)
        if disk.is_ours(directory)
        for name in sorted(disk.names(directory))
        if fragments.attempt_of(name) is not None
    ]


def _run_named_in(path: Path) -> str | None:
    """The name of the run that a file of rows says it belongs to; None if it says none."""
    import pyarrow as pa

    try:
        return str(_table(path.name, disk.read(path))["run"][0].as_py())
    except (pa.ArrowException, OSError, ValueError, KeyError, IndexError):
        return None


def _rows(table: pa.Table) -> Iterator[tuple[object, ...]]:
    """By what each row of a table is known."""
    return zip(*(table[name].to_pylist() for name in _ROW), strict=True)


def _is_final(name: str, data: bytes) -> bool:
    """Return whether the row in a file of one row is its job's final one, of an attempt."""
    (row,) = _table(name, data).select(("final", "attempt_number")).to_pylist()
    return bool(row["final"] and row["attempt_number"])


def _table(name: str, data: bytes) -> pa.Table:
    """The rows of a spilled file: a record, or Parquet of an earlier version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from orchestrator.results.record import record_table

    if fragments.is_record(name):
        return record_table(name, data)
    return pq.read_table(pa.BufferReader(data))
