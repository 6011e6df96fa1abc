"""The files of a run as lines of text, for a channel that carries nothing else.

Ray's job interface has no files, but shows what a job prints. ``python -m
orchestrator.results.parcels RUN`` prints, on the machine that has the run, those of its files that
the other side lacks: first a list, then each file in parts, every part and every file with its
SHA-256. ``Receiver`` writes a file when the last of its parts is there and whole, so an interrupted
transfer leaves whole files, and the next one brings the rest.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, fragments, paths
from orchestrator.results.append_log import is_log
from orchestrator.results.directory import directory_of
from orchestrator.results.finding import find_run
from orchestrator.results.identity import id_at
from orchestrator.results.scan import has_rows
from orchestrator.util import output
from workloads.util import files

MARK = "NIGHTGRID-PARCEL-1"
PART_BYTES = 48 * 1024
#: Stands among what a receiver has if it takes logs of rows; earlier versions do not.
TAKES_LOGS = "takes logs"
#: Files of a run besides its rows that mean something elsewhere. The status comes last: what it
#: counts is there.
SIDE_FILES = (paths.GRID, paths.OPTIONS, paths.PASSPORTS, paths.REPORT, paths.STATUS)


def carried(run: Path) -> list[str]:
    """The names of a run's files that mean something elsewhere, beneath its directory.

    Raises:
        OSError: its rows cannot be listed.
    """
    try:
        rows = sorted(disk.names(run / paths.ROWS))
    except FileNotFoundError:
        rows = []
    rows = [name for name in rows if has_rows(name) and _may_travel(run / paths.ROWS / name)]
    names = [f"{paths.ROWS}/{name}" for name in rows]
    with contextlib.suppress(OSError):
        names += sorted(filter(paths.is_trace, disk.names(run)))
    return names + [name for name in SIDE_FILES if os.path.isfile(run / name)]


def _may_travel(path: Path) -> bool:
    """Return whether what lies among the rows is an ordinary file with a name that a receiver
    takes: a foreign one is not carried, and keeps no other from it."""
    if not is_log(path.name):
        try:
            fragments.valid_name(path.name, "file name")
        except StoreError:
            return False
    return os.path.isfile(path)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    whole = hashlib.sha256()
    with files.opened(path) as file:
        while piece := file.read(2**20):
            whole.update(piece)
    return whole.hexdigest()


def digests(run: Path) -> dict[str, str]:
    """The SHA-256 of each of a run's files that are carried, by name."""
    found = {}
    for name in carried(run):
        try:
            found[name] = digest_of(run / name)
        except OSError:  # it has gone meanwhile, as rows do when they are compacted
            continue
    return found


def what_is_there(run: Path) -> dict[str, str]:
    """The ``have`` of a receiver for its sender, ``lines_of``."""
    return digests(run) | {TAKES_LOGS: ""}


# ---------------------------------------------------------------- sending


def lines_of(run: Path, have: Mapping[str, str]) -> Iterator[str]:
    """The lines that bring somebody who has ``have`` (``what_is_there``) what the run has."""
    listed = carried(run)
    there = digests(run)
    # Else a log may be missing here whose rows came in a file that is missing, too.
    at_rest = listed == list(there) == carried(run)
    if TAKES_LOGS not in have:
        there = {name: each for name, each in there.items() if not is_log(os.path.basename(name))}
    wanted = [name for name, digest in there.items() if have.get(name) != digest]
    head = {"run": run.name, "run_id": id_at(run) or "", "wanted": wanted, "files": len(there)}
    logs = [name for name in there if is_log(os.path.basename(name))]
    head["logs"] = logs if at_rest else None
    yield f"{MARK} begin {json.dumps(head)}"
    for name in wanted:
        try:
            data = disk.read(run / name)
        except OSError as error:
            yield f"{MARK} gone {json.dumps({'name': name, 'why': error.strerror})}"
            continue
        parts = range(0, max(1, len(data)), PART_BYTES)
        for number, start in enumerate(parts, 1):
            part = zlib.compress(data[start : start + PART_BYTES])
            check = hashlib.sha256(part).hexdigest()[:16]
            yield f"{MARK} part {check} {base64.b64encode(part).decode()}"
            if number == len(parts):
                whole = {"name": name, "sha256": hashlib.sha256(data).hexdigest()}
                yield f"{MARK} file {json.dumps(whole)}"
    yield f"{MARK} end"


def main(arguments: list[str] | None = None) -> int:
    """Print a run's files; the other side is a ``Receiver``."""
    parser = argparse.ArgumentParser(prog="parcels", description=main.__doc__)
    parser.add_argument("run")
    parser.add_argument("--results", type=directory_of)
    parser.add_argument("--have", type=Path, help="JSON: SHA-256 by name of what is there already")
    args = parser.parse_args(arguments)
    try:
        store = find_run(args.run, args.results)
        have = json.loads(files.read_text(args.have)) if args.have else {}
    except StoreError as error:
        output.say(f"{MARK} refused {json.dumps(str(error))}")
        return StoreError.exit_code
    for line in lines_of(store.path, have):
        output.say(line)
    return 0


# ---------------------------------------------------------------- receiving


def _fetched_logs(run: Path) -> list[str]:
    """The names of the logs that transfers brought into a copy."""
    try:
        return files.read_text(run / paths.FETCHED_LOGS).split()
    except (OSError, ValueError):  # none is removed
        return []


@dataclass(slots=True)
class Receiver:
    """Writes the files that come as lines.

    Attributes:
        begin: told what comes before the first file; it says where the files go, or raises.
    """

    begin: Callable[[Mapping[str, object]], Path]
    finished: bool = False
    received: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # that did not come whole
    _run: Path | None = None
    _wanted: set[str] | None = None  # that the sender is about to send; None where it says nothing
    _logs: list[str] | None = None  # all of the sender; None where it cannot tell
    _text: str = ""
    _parts: list[bytes] = field(default_factory=list)
    _broken: bool = False

    def feed(self, text: str) -> None:
        """Take some of the text, cut anywhere.

        Raises:
            StoreError: the sender refused, or a file cannot be written.
        """
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            mark, _, rest = line.partition(" ")
            if mark == MARK:
                self._take(*rest.partition(" ")[::2])

    def _take(self, what: str, rest: str) -> None:
        if what == "part":
            self._part(*rest.partition(" ")[::2])
            return
        try:
            told = json.loads(rest) if rest else {}
        except ValueError:
            self._broken = True  # of a line that was cut; the file's digest will say so
            return
        if what == "refused":
            raise StoreError(str(told))
        if what == "begin":
            self._run, self._logs = self.begin(told), told.get("logs")
            names = told.get("wanted")
            self._wanted = None if names is None else set(names)
        elif what == "file" and self._run is not None:
            self._file(self._run, str(told.get("name")), str(told.get("sha256")))
        elif what == "end":
            self.finished = True
            # Else a log is kept until what came in its place is here.
            whole = (self._wanted or set()) <= {*self.received}
            if self._run is not None and self._logs is not None and whole:
                self._forget_logs(self._run, self._logs)

    def _forget_logs(self, run: Path, logs: Sequence[str]) -> None:
        """Remove the logs of an earlier transfer whose rows came in Parquet by now; not those of
        a driver that goes on with the copy."""
        for log in _fetched_logs(run):
            if is_log(log) and f"{paths.ROWS}/{log}" not in logs:
                with contextlib.suppress(OSError):
                    disk.remove(run / paths.ROWS / log)

    def _part(self, check: str, text: str) -> None:
        try:
            part = base64.b64decode(text, validate=True)
            self._broken |= hashlib.sha256(part).hexdigest()[:16] != check
            self._parts.append(b"" if self._broken else zlib.decompress(part))
        except (ValueError, zlib.error):
            self._broken = True

    def _file(self, run: Path, name: str, digest: str) -> None:
        data, broken = b"".join(self._parts), self._broken
        self._parts, self._broken = [], False
        if broken or hashlib.sha256(data).hexdigest() != digest:
            self.damaged.append(name)
            return
        folder, _, last = name.rpartition("/")
        row = folder == paths.ROWS and has_rows(last)
        known = row or name in SIDE_FILES or paths.is_trace(name)
        if not known:  # a name of the other side's making leads nowhere else
            raise StoreError(f"{name!r} is no file of a run")
        if self._wanted is not None and name not in self._wanted:  # it was changed on its way
            self.damaged.append(name)
            return
        directory = run / folder if folder else run
        disk.make_directory(directory)
        if is_log(last) and last not in (logs := _fetched_logs(run)):
            still = [log for log in logs if disk.is_there(directory / log)]
            fragments.replace_file(run, paths.FETCHED_LOGS, "\n".join([*still, last]).encode())
        if folder:
            name_there = last if is_log(last) else fragments.valid_name(last, "file name")
            fragments.write_durably(directory, name_there, data)
        else:
            fragments.replace_file(directory, last, data)
        self.received.append(name)


if __name__ == "__main__":
    sys.exit(main())
