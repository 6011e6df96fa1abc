"""Copies of runs: in an object store, and fetched from there or from a cluster.

*A mirror* (``s3://BUCKET/PREFIX``, ``gs://BUCKET/PREFIX``) follows a run: a thread copies changes
every few seconds and the rest at the end; while the address is unreachable the run goes on, and a
later try copies what is missing. ``mirror.json`` there names the run, so that another of its name
is refused. S3 is tested over HTTP; Google's is untested.

*A copy* is fetched (``receive``): rows that have come are not read again, but for those of logs. A
cluster's files are read by ``on_ray/run_status.py``.

A run merges its files when it ends. What it merged goes from both, too: plain readers would see it
twice. A file goes only if all its rows are in valid files that the run and its copy have.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.store import disk, files
from orchestrator.store.log import is_log
from orchestrator.store.reader import (
    ROW_KEY,
    has_rows,
    keys_in_file,
    read_rows,
    row_files,
    row_keys,
)
from orchestrator.store.store import Store
from orchestrator.util.redaction import redact
from workloads.util.files import read_text

INTERVAL_S = 10.0
MARKER = "mirror.json"
_REQUESTS_TOGETHER = 8  # a night of ten hours merges 3,600 files


def travelling_files(run: Path) -> list[str]:
    """Names of the files to copy, status after its rows; OSError if rows cannot be listed."""
    names: list[str] = []
    for folder in (files.ROWS, files.REQUESTS, ""):
        with contextlib.suppress(FileNotFoundError if folder == files.ROWS else OSError):
            listed = sorted(disk.names(run / folder), key=lambda name: (name == files.STATUS, name))
            names += [str(Path(folder, name)) for name in listed]
    return [name for name in names if _travels(name) and os.path.isfile(run / name)]


def _travels(name: str) -> bool:
    """Return whether a file of this relative name is copied; others are never written."""
    folder, _, last = name.rpartition("/")
    known = {
        "": files.travels(name),
        files.ROWS: has_rows(last),
        files.REQUESTS: last.endswith(".arrow") and not last.startswith("."),
    }
    return known.get(folder, False) and disk.is_valid_name(last.removeprefix("."))


def receive(names: Iterable[str], read: Callable[[str], bytes], here: Path) -> list[str]:
    """Write those of a run's files that ``here`` lacks, or that may have changed; returns their
    names. Names of other files are ignored, and files that ``read`` does not find. Files of rows
    go that the run has merged into others."""
    received, names = [], list(names)
    for name in names:
        path = here / name
        final = path.parent != here and not is_log(path.name)
        if not _travels(name) or (final and disk.is_there(path)):
            continue
        with contextlib.suppress(FileNotFoundError):  # merged meanwhile
            data = read(name)
            disk.make_directory(path.parent)
            write = disk.write_durably if path.parent.name == files.ROWS else disk.replace_file
            write(path.parent, path.name, data)
            received.append(name)
    rows = here / files.ROWS
    with contextlib.suppress(StoreError, OSError):  # the next fetch tries again
        there = {name.removeprefix(f"{files.ROWS}/") for name in names}
        if gone := set(filter(_is_parquet, row_files(rows) - there)):
            kept = _keys_in(rows, there)
            for name in gone:
                if _is_merged(name, disk.read(rows / name), kept):
                    disk.remove(rows / name)
    return received


def _is_parquet(name: str) -> bool:
    return name.endswith(".parquet")


def _keys_in(rows: Path, names: Set[str]) -> set[tuple[object, ...]]:
    """The keys of all rows in the valid Parquet files of these names. May raise StoreError."""
    look = read_rows(rows, ROW_KEY, only=set(filter(_is_parquet, names)))
    return {key for table in look.tables.values() for key in row_keys(table)}


def _is_merged(name: str, data: bytes, kept: Set[tuple[object, ...]]) -> bool:
    """Return whether a file is valid and has no row but those that are kept elsewhere."""
    keys = keys_in_file(name, data)
    return bool(keys) and keys <= kept


# ---------------------------------------------------------------- the directory of a copy


def copy_directory(results: Path, name: str, source: str, run_id: str) -> Path:
    """Return the directory of a copy, created with ``fetched.json``, that has the run (``run_id``
    "": it has none yet) and its ``source``.

    Raises StoreError if the name is that of a local run, another run's copy, or a copy that a
    driver has resumed.
    """
    store = Store(results, name)
    elsewhere = "fetch into another directory (--results DIR) or under another name (--as NAME)"
    known = None
    if disk.is_there(store.path):
        known = copied_id(store.path)
        if known is None or (run_id and known not in ("", run_id)):
            whose = "a run of this machine" if known is None else "a copy of another run"
            raise StoreError(f"{store.path} is {whose}; {elsewhere}")
        # Every driver leaves the id of its run, which never travels.
        if any(disk.is_there(store.path / file) for file in (files.RUN_ID, files.LOCK)):
            raise StoreError(
                f"a driver has gone on with {store.path} here, a copy that was fetched: what comes "
                f"now could be of the same attempts; {elsewhere}"
            )
    if known is None or (run_id and not known):  # add the id that the run lacked before
        disk.make_directory(store.tables_path)
        store.write_file(files.FETCHED, json.dumps({"run_id": run_id, "from": source}))
    return store.path


def copied_id(run: Path) -> str | None:
    """Id of the run that a directory is a copy of; None if it is no copy."""
    try:
        return str(json.loads(read_text(run / files.FETCHED))["run_id"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


# ---------------------------------------------------------------- an object store


class Mirror:
    """The copy of one run's directory in an object store, at ``address``/name.

    Raises StoreError if the address has another run of this name, or cannot be written, unless the
    run was copied there before (``again``).
    """

    def __init__(self, run: Path, address: str, run_id: str, *, again: bool = False) -> None:
        self._run = run
        self.address = shown_address(address)
        self._files, base = _file_system(address)
        self._there = f"{base}/{run.name}"
        self._copied: dict[str, tuple[int, int]] = {}  # by name: size and time of what was copied
        self._sizes: dict[str, int] | None = None  # of the files of rows there; None: not known yet
        self._only_there: Set[str] = set()  # files of rows that are gone here, and not merged
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble = ""
        try:
            known = _run_at(self._files, self._there)
            if known is not None and known != run_id:
                raise StoreError(
                    f"{self.address} has another run {run.name!r}; choose another --run NAME, or "
                    "another address"
                )
            self._write(MARKER, json.dumps({"run_id": run_id}).encode())
        except OSError as error:
            why = f"results cannot be copied to {self.address}: {_reason(error)}"
            if not again:
                raise StoreError(why) from None
            self.trouble = why

    def start(self) -> None:
        """Copy what changes, until ``close``."""
        self._thread = threading.Thread(target=self._work, name="results", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy the rest; ``trouble`` says what could not be."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.copy()

    def copy(self) -> int:
        """Copy changed files as far as possible and return their number; logs only at the end."""
        count, unread = 0, ""
        try:
            if self._sizes is None:
                self._sizes = self._sizes_there()
            names = travelling_files(self._run)
            for name in names:
                path = self._run / name
                if is_log(path.name) and not self._ended.is_set():  # it still grows
                    continue
                try:
                    status = os.stat(path)
                    stamp = (status.st_size, status.st_mtime_ns)
                    if self._copied.get(name) == stamp:
                        continue
                    data = disk.read(path)
                except FileNotFoundError:  # compacted meanwhile
                    continue
                except OSError as error:
                    why = error.strerror or error
                    unread = f"{path} cannot be read, and is not copied to {self.address}: {why}"
                    continue
                # The name of a file of rows holds its digest; a log only grows.
                if self._sizes.get(name) != len(data):
                    self._write(name, data)
                    count += 1
                    if name.startswith(f"{files.ROWS}/"):
                        self._sizes[name] = len(data)
                self._copied[name] = stamp
            self.trouble = unread or self._remove_merged(self._sizes, set(names))
        except OSError as error:
            self.trouble = (
                f"results cannot be copied to {self.address}: {_reason(error)}; they are safe in "
                f"{self._run}"
            )
        return count

    def _sizes_there(self) -> dict[str, int]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(f"{self._there}/{files.ROWS}", allow_not_found=True)
        found = self._files.get_file_info(selector)
        return {f"{files.ROWS}/{info.base_name}": info.size for info in found if info.is_file}

    def _remove_merged(self, sizes: dict[str, int], here: Set[str]) -> str:
        """Remove the files of rows that the run has merged into others; return what failed."""
        gone = set(filter(_is_parquet, sizes.keys() - here))
        if gone == self._only_there:
            return ""

        def remove(name: str) -> None:
            path = f"{self._there}/{name}"
            with contextlib.suppress(FileNotFoundError):
                with self._files.open_input_stream(path) as stream:
                    data = bytes(stream.read())
                if not _is_merged(Path(name).name, data, kept):
                    return
                self._files.delete_file(path)
            del sizes[name]
            self._copied.pop(name, None)

        try:
            kept = _keys_in(
                self._run / files.ROWS, {Path(name).name for name in sizes.keys() & here}
            )
            with ThreadPoolExecutor(_REQUESTS_TOGETHER) as side_by_side:
                for _ in side_by_side.map(remove, sorted(gone)):  # the first error ends it
                    pass
        except (OSError, StoreError) as error:
            why = f"files that the run has merged stay at {self.address}: {_reason(error)}"
            return f"{why}; plain readers see their rows twice"
        self._only_there = gone & sizes.keys()
        return ""

    def _work(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.copy()

    def _write(self, name: str, data: bytes) -> None:
        # An object store has an object whole or not at all.
        with self._files.open_output_stream(f"{self._there}/{name}") as stream:
            stream.write(data)


def fetch_from(address: str, run: str, directory: Callable[[str], Path]) -> list[str]:
    """Fetch missing rows and all side files of a run's mirror; return their names.

    ``directory`` maps the run's id to the target, or raises. Raises StoreError if there is no such
    run or the address cannot be read.
    """
    from pyarrow.fs import FileSelector

    there_files, base = _file_system(address)
    there = f"{base}/{run}"

    def read(name: str) -> bytes:
        with there_files.open_input_stream(f"{there}/{name}") as stream:
            return bytes(stream.read())

    try:
        run_id = _run_at(there_files, there)
        if run_id is None:
            raise StoreError(f"there is no run {run!r} at {shown_address(address)}")
        here = directory(run_id)
        selector = FileSelector(there, recursive=True, allow_not_found=True)
        paths = sorted(info.path for info in there_files.get_file_info(selector))
        return receive([path.removeprefix(f"{there}/") for path in paths], read, here)
    except OSError as error:
        raise StoreError(f"{shown_address(address)} cannot be read: {_reason(error)}") from None


def shown_address(address: str) -> str:
    """The address for messages, without secrets and options."""
    return redact(address.partition("?")[0], {})


def _run_at(there_files: Any, there: str) -> str | None:
    """The id of the run whose copy lies there; None where there is none."""
    try:
        with there_files.open_input_stream(f"{there}/{MARKER}") as stream:
            return str(json.loads(stream.read())["run_id"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _file_system(address: str) -> tuple[Any, str]:
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    try:
        there_files, base = FileSystem.from_uri(address)
    except (ArrowException, OSError, ValueError) as error:
        shown = shown_address(address)
        raise StoreError(f"{shown} is not an address for results: {_reason(error)}") from None
    return there_files, base.rstrip("/")


def _reason(error: BaseException) -> str:
    return " ".join(redact(str(error), os.environ).split())[:300]
