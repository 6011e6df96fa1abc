"""A copy of a run's files at an address: ``s3://BUCKET/PREFIX`` or ``gs://BUCKET/PREFIX``.

The run's own directory comes first: a row is safe when it is there, and nothing waits for the
copy. A thread brings over what has changed every few seconds, and all of it at the end. While the
address cannot be reached the run says so and goes on; the next try, or the next driver, brings what
is missing. ``mirror.json`` there names the run, so that another one of its name is refused.

pyarrow speaks to both kinds of address, with the credentials that their own tools use. S3 is tested
over HTTP; Google's was only read, nobody has tried it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, fragments, paths
from orchestrator.results.append_log import is_log
from orchestrator.results.parcels import SIDE_FILES, carried
from orchestrator.results.scan import has_rows
from orchestrator.worker.redaction import redact

INTERVAL_S = 10.0
MARKER = "mirror.json"


class _UnreadError(Exception):
    """A file of the run cannot be read now."""


class Mirror:
    """The copy of one run.

    Args:
        run: its directory.
        address: where the copy lies, beneath the run's name.
        run_id: by which the run is known.
        again: the run has been copied there before; it goes on even if the address is away now.

    Raises:
        StoreError: the address cannot be written, or another run has its name there.
    """

    def __init__(self, run: Path, address: str, run_id: str, *, again: bool = False) -> None:
        self._run = run
        self.address = shown(address)
        self._files, base = _file_system(address)
        self._there = f"{base}/{run.name}"
        self._copied: dict[str, tuple[int, int]] = {}  # by name: size and time of what was copied
        self._logs: set[str] = set()  # that were there at the last look
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble = ""
        try:
            self._claim(run_id)
        except OSError as error:
            why = f"results cannot be copied to {self.address}: {_why(error)}"
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
        """Bring over what has changed, as far as that is possible; the number of files."""
        count, unread = 0, ""
        try:
            names = carried(self._run)
            logs = {name for name in names if is_log(os.path.basename(name))}
            # An object store cannot append: the rows of a log go there as Parquet, unless none is
            # made of it, on a full disk for one.
            soon = set() if self._ended.is_set() else logs - self._logs
            self._logs = logs
            for name in names:
                if name not in soon:
                    try:
                        count += self._copy_one(name)
                    except _UnreadError as error:
                        unread = unread or str(error)
            self.trouble = unread
        except OSError as error:
            self.trouble = (
                f"results cannot be copied to {self.address}: {_why(error)}; they are safe in "
                f"{self._run}"
            )
        return count

    def _work(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.copy()

    def _copy_one(self, name: str) -> bool:
        try:
            there = os.stat(self._run / name)
        except FileNotFoundError:  # compacted meanwhile
            return False
        seen = (there.st_size, there.st_mtime_ns)
        if self._copied.get(name) == seen:
            return False
        is_row = name.startswith(f"{paths.ROWS}/")
        # Its name holds its digest; a log only grows.
        if is_row and self._size_there(name) == there.st_size:
            self._copied[name] = seen
            return False
        try:
            data = disk.read(self._run / name)
        except FileNotFoundError:
            return False
        except OSError as error:
            why = f"{self._run / name} cannot be read, and is not copied to {self.address}"
            raise _UnreadError(f"{why}: {error.strerror or error}") from error
        self._write(name, data)
        self._copied[name] = seen
        return True

    def _claim(self, run_id: str) -> None:
        known = read_marker(self._files, self._there)
        if known is not None and known != run_id:
            raise StoreError(
                f"{self.address} has another run {self._run.name!r}; choose another --run NAME, or "
                "another address"
            )
        self._write(MARKER, json.dumps({"run_id": run_id}).encode())

    def _size_there(self, name: str) -> int | None:
        size: int | None = self._files.get_file_info(f"{self._there}/{name}").size
        return size

    def _write(self, name: str, data: bytes) -> None:
        # An object store has an object whole or not at all.
        with self._files.open_output_stream(f"{self._there}/{name}") as stream:
            stream.write(data)


def fetch_from(address: str, run: str, directory: Callable[[str], Path]) -> list[str]:
    """Bring a run's copy at an address to this machine: rows that are not here, and side files.

    Args:
        run: its name there.
        directory: where it goes, given the run's id; may refuse.

    Raises:
        StoreError: there is no such run, or the address cannot be read.
    """
    from pyarrow.fs import FileSelector

    files, base = _file_system(address)
    there = f"{base}/{run}"
    received = []
    try:
        run_id = read_marker(files, there)
        if run_id is None:
            raise StoreError(f"there is no run {run!r} at {shown(address)}")
        here = directory(run_id)
        found = files.get_file_info(FileSelector(there, recursive=True, allow_not_found=True))
        for info in sorted(found, key=lambda info: info.path):
            name = info.path.removeprefix(f"{there}/")
            folder, _, last = name.rpartition("/")
            row = folder == paths.ROWS and has_rows(last)
            beside = name in SIDE_FILES or paths.is_trace(name)
            if not (row or beside) or (row and _size_of(here / name) == info.size):
                continue
            with files.open_input_stream(info.path) as stream:
                data = stream.read()
            if row:
                disk.make_directory(here / folder)
                name_here = last if is_log(last) else fragments.valid_name(last, "file name")
                fragments.write_durably(here / folder, name_here, data)
            else:
                fragments.replace_file(here, name, data)
            received.append(name)
    except OSError as error:
        raise StoreError(f"{shown(address)} cannot be read: {_why(error)}") from None
    return received


def read_marker(files: Any, there: str) -> str | None:
    """The id of the run whose copy lies there; None where there is none."""
    try:
        with files.open_input_stream(f"{there}/{MARKER}") as stream:
            return str(json.loads(stream.read())["run_id"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def shown(address: str) -> str:
    """The address for people: without a key in it, and without its options."""
    return redact(address.partition("?")[0], {})


def _file_system(address: str) -> tuple[Any, str]:
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    try:
        files, base = FileSystem.from_uri(address)
    except (ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{shown(address)} is no address for results: {_why(error)}") from None
    return files, base.rstrip("/")


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _why(error: BaseException) -> str:
    return " ".join(redact(str(error), os.environ).split())[:300]
