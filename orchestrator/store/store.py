"""The rows of one run: appended to a log, then moved into Parquet.

A row is durable when ``append`` returns; ``to_parquet`` publishes it every few seconds, and removes
a log once the file with its rows is safe. The next writer repairs what a crash leaves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import StoreError
from orchestrator.store import disk, files, identity, reader
from orchestrator.store.codec import row_of
from orchestrator.store.lock import SILENCE_S, Holder, RunLock
from orchestrator.store.log import AttemptJournal, Line, RowLog, is_log, lines_in, read_journal

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestrator.core.measurement import Measurement
    from orchestrator.core.plan import PastRow

_LOG = logging.getLogger("nightgrid.store")
#: A closing writer merges so many files of fewer rows: a file takes 58 KB, however few it has.
COMPACT_FROM, FEW_ROWS = 10, 1000
#: Runs that an error message lists.
MOST_LISTED = 20
_ATTEMPT_IN_LINE = re.compile(rb'"attempt_id":"([A-Za-z0-9_-]{1,80}-\d{1,9})"')


class Store:
    """The rows of one run. Reading needs no lock; ``with store:`` makes this process the writer.

    Raises StoreError if the name is invalid or the directory leads out of the results.
    """

    def __init__(
        self,
        results_dir: Path,
        run: str,
        *,
        lock: RunLock | None = None,
        log: RowLog | None = None,
    ) -> None:
        self.run = disk.valid_name(run, "run name")
        self.path = Path(results_dir) / self.run
        self.tables_path = self.path / files.ROWS
        self.quarantine_path = self.path / files.QUARANTINE
        for path in (self.path, self.tables_path, self.quarantine_path, self.path / files.LOGS):
            # os.path.realpath, since Path.resolve raises where links go round in a circle
            if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(results_dir)):
                raise StoreError(f"{path} leads out of {results_dir}; link the latter instead")
        self.taken_over_from: Holder | None = None
        self.interrupted: tuple[str, ...] = ()  # attempts that a predecessor's death ended
        self._identity: identity.Identity | None = None
        self._lock = lock or RunLock(self.path)
        self._log = log or RowLog(self.tables_path)
        self._journal = AttemptJournal(self.path / files.JOURNAL)
        self._making = threading.Lock()  # of a Parquet file
        self._unread: set[str] = set()  # logs that could not be read; reported once

    @classmethod
    def existing(cls, results_dir: Path, run: str) -> Store:
        """Return the store of a started run; StoreError, with a list of runs, if there is none."""
        store = cls(results_dir, run)
        if store.exists:
            return store
        known = existing_runs(results_dir)
        lines = known[:MOST_LISTED]
        lines += [f"and {len(known) - MOST_LISTED} more"] if len(known) > MOST_LISTED else []
        listed = "".join(f"\n    {line}" for line in lines)
        raise StoreError(f"there is no run {run!r} in {results_dir}. Newest first:{listed}")

    # ------------------------------------------------------------ reading

    @property
    def exists(self) -> bool:
        """Return whether the run was ever started."""
        return os.path.isdir(self.tables_path)

    def read(self, *, samples: bool = True) -> reader.Contents:
        """Return valid rows and all damage; raise SchemaMismatch for a newer version's rows."""
        return reader.read_contents(self.tables_path, self.quarantine_path, raw=samples)

    def measurements(self, samples: bool = True) -> list[Measurement]:
        """The rows in the order of recording; faster without ``samples``."""
        return list(self.read(samples=samples).measurements)

    def history(self) -> list[PastRow]:
        """The columns of each row that planning and estimating need, oldest first."""
        from orchestrator.store.history import past_rows

        return past_rows(self.tables_path)

    def attempts_set_aside(self, job_ids: Iterable[str]) -> dict[str, int]:
        """Highest attempt number by job id among damaged rows, which must not be reused."""
        numbers: dict[str, int] = {}
        for damage in reader.set_aside_earlier(self.quarantine_path):
            if name := reader.parsed_name(damage.path.name):
                numbers[name.job_id] = max(name.attempt, numbers.get(name.job_id, 0))
        of_any = numbers.pop("", 0)
        return {job_id: most for job_id in job_ids if (most := max(of_any, numbers.get(job_id, 0)))}

    # ------------------------------------------------------------ the one writer

    def __enter__(self) -> Store:
        """Become the writer.

        Raises StoreLocked if another driver holds the run; the message names it; StoreError if
        interrupted attempts cannot be determined, or the file system fails.
        """
        try:
            disk.make_directory(self.tables_path)
            disk.sync_directory(self.path)
        except OSError as error:
            raise StoreError(f"cannot create {self.tables_path}: {error.strerror}") from error
        self.taken_over_from = self._lock.acquire()
        try:
            self._clear_up()
            self._identity = identity.identify(self.path, self.quarantine_path)
            self.interrupted = self._record_interrupted()
            try:
                self.to_parquet()  # what a dead driver left in logs, too
            except Exception as problem:  # our reader finds them where they are
                _LOG.warning("rows of a log are not in Parquet: %s", str(problem) or repr(problem))
            with contextlib.suppress(StoreError):  # the first row that finds no room reports it
                self.make_reserve()
        except BaseException as error:
            self._log.close()
            self._lock.release()
            if isinstance(error, OSError):
                where = error.filename or self.path
                what = f"{self.path} cannot be opened for writing: {where}"
                raise StoreError(f"{what}: {error.strerror or error}") from error
            raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        ours = self._is_ours()
        try:
            if ours:
                self.to_parquet()
                if error is None:
                    repeated = reader.read_rows(self.tables_path, reader.ROW_KEY).repeated
                    if repeated or len(self._files_with_few_rows()) >= COMPACT_FROM:
                        self.compact(everything=repeated)
        except Exception as problem:  # a convenience; the rows are safe without it
            _LOG.warning("the rows were not compacted: %s", str(problem) or repr(problem))
        finally:
            self._log.close()
            ours = ours and self._is_ours()
            self._journal.close(ours=ours)
            if ours:
                files.remove_reserve(self.path)
            self._lock.release()

    def refuse_if_held(self) -> None:
        """Raise StoreLocked or StoreError as ``with store:`` would."""
        self._lock.refuse_if_held()

    def resume(self) -> Store:
        """Let ``with store:`` take over from another host's holder silent for ``SILENCE_S``."""
        self._lock.silence_means_death_s = SILENCE_S
        return self

    @property
    def run_id(self) -> str:
        """Unique id of the run; StoreError if this process is not the writer."""
        if self._identity is None:
            raise StoreError(f"{self.path} is not open for writing: its run id is not known")
        return self._identity.run_id

    @property
    def note(self) -> str:
        """A sentence for the user about the run's id; empty without one."""
        return self._identity.note if self._identity is not None else ""

    def append(self, *measurements: Measurement) -> Path:
        """Write rows, which survive a power failure on return, and return the log's path. Safe to
        repeat after an error: duplicate rows are read once.

        Raises StoreFull if no space is left, StoreLocked if the lock was taken away, else
        StoreError.
        """
        self._lock.still_mine()
        path = self._log.append([row_of(measurement) for measurement in measurements])
        self._lock.still_mine()  # else a successor may have read the log already
        self._journal.end(measurement.attempt_id for measurement in measurements)
        return path

    def begin(self, *rows: Measurement) -> None:
        """Record starting attempts by the rows they get if this process dies before ``append``.

        Survives the death of the process, not a power failure. Raises StoreError, or StoreFull.
        """
        self._lock.still_mine()
        self._journal.begin([row_of(row) for row in rows])

    def forget_interrupted(self) -> None:
        """Remove a dead predecessor's journal: what nodes kept of ``interrupted`` has its rows."""
        if self._is_ours():
            with contextlib.suppress(OSError):  # ``begin`` replaces it
                disk.remove(self._journal.path)

    def write_file(self, name: str, content: str | bytes) -> Path:
        """Replace a side file (report, status, grid) atomically; see ``files.write_side_file``."""
        return files.write_side_file(self.path, name, content)

    def make_reserve(self) -> None:
        """Reserve some space for ``status.json``; raises StoreFull if there is none."""
        files.make_reserve(self.path)

    def _is_ours(self) -> bool:
        with contextlib.suppress(StoreError):
            self._lock.still_mine()
            return True
        return False

    # ------------------------------------------------------------ Parquet

    def to_parquet(self) -> Path | None:
        """Move the rows of all logs into a Parquet file; None if there are none.

        Another thread may append meanwhile. Damaged lines are set aside. A driver that lost the
        lock leaves the logs to its successor.

        Raises StoreError or OSError, and no row is lost, if it is not the writer or cannot write.
        """
        with self._making:
            self._lock.still_mine()
            if not (logs := self._read_logs()):
                return None
            lines = [line for data in logs.values() for line in lines_in(data)]
            table, damaged = reader.table_of_lines(lines)
            path = None
            if table.num_rows:
                path = self._write_parquet(reader.without_repeated(table, set()))
            for line in damaged:
                self._set_line_aside(line)
            self._lock.still_mine()
            self._remove(logs)
            return path

    def compact(self, *, everything: bool = True) -> Path | None:
        """Merge all valid files, or those with few rows, into one; None if fewer than two. May
        raise StoreError or OSError."""
        self.to_parquet()
        with self._making:
            names = {name for name in reader.row_files(self.tables_path) if not is_log(name)}
            if not everything:
                names = self._files_with_few_rows()
            look = reader.read_rows(self.tables_path, only=names)
            look.refuse_unread("what is to be compacted")
            old = names - {damage.path.name for damage in look.damaged}
            if len(old) < 2:
                return None
            path = self._write_parquet(look.table())
            self._remove(old - {path.name})
            return path

    def _files_with_few_rows(self) -> set[str]:
        names = reader.row_files(self.tables_path)
        return {name for name in names if 0 < reader.about_how_many([name]) < FEW_ROWS}

    def _write_parquet(self, table: pa.Table) -> Path:
        """Write a file of rows that are safe elsewhere; StoreError if it does not read back."""
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", write_statistics=False)
        data = sink.getvalue().to_pybytes()
        highest = pc.max(table["attempt_number"]).as_py()
        name = reader.file_name(table.num_rows, highest, data)
        # A driver that was stalled while it wrote may have a successor that did the same.
        path = disk.write_durably(self.tables_path, name, data, self._lock.still_mine)
        if disk.read(path) != data:
            disk.remove(path)
            # Without its name: each try has another, and a cause is said once.
            what = f"a new file in {self.tables_path} does not read back as written"
            raise StoreError(f"{what}; what it replaces was kept")
        return path

    def _read_logs(self) -> dict[str, bytes]:
        """Close our log and read all logs by name; unreadable ones are reported once and stay."""
        contents = {}
        for name in filter(is_log, self._log.rotate()):
            path = self.tables_path / name
            try:
                contents[name] = disk.read(path)
            except OSError as error:
                if name not in self._unread:
                    why = error.strerror or error
                    _LOG.warning("%s cannot be read, its rows are not in Parquet: %s", path, why)
                self._unread.add(name)
        return contents

    def _set_line_aside(self, line: Line) -> None:
        """Move a damaged line to the quarantine, under the name of its attempt if it has that."""
        attempt = _ATTEMPT_IN_LINE.search(line.data)
        name = f"{attempt[1].decode() if attempt else 'line'}-{disk.digest(line.data)}.jsonl"
        disk.make_directory(self.quarantine_path)
        path = disk.write_durably(self.quarantine_path, name, line.data)
        _LOG.warning("set aside as %s: %s", path, line.reason)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(self.tables_path / name)
        disk.sync_directory(self.tables_path)

    # ------------------------------------------------------------ after a crash

    def _clear_up(self) -> None:
        """Quarantine damaged files and remove partial ones, whose rows are elsewhere."""
        for name in sorted(disk.names(self.tables_path)):
            path = self.tables_path / name
            if name.startswith("."):
                if name.endswith(".parquet.partial"):
                    with contextlib.suppress(OSError):
                        disk.remove(path)
                continue
            if not name.endswith(".parquet"):
                continue
            try:
                reason = reader.damage_of(name, disk.read(path))
            except OSError as error:  # a directory or a dangling link of this name, or a bad sector
                if disk.may_pass(error):
                    _LOG.warning("%s cannot be read now, and stays: %s", path, error.strerror)
                    continue
                reason = str(error)
            if reason is not None:
                with contextlib.suppress(OSError):  # another user's directory: it stays there
                    aside = disk.set_aside(path, self.quarantine_path)
                    _LOG.warning("set aside as %s: %s", aside, reason)

    def _record_interrupted(self) -> tuple[str, ...]:
        """Write rows for attempts that dead predecessors had running; return their ids.

        The journal stays until ``forget_interrupted``: should this process die before, too, the
        next one returns the ids again.
        """
        path, what = self._journal.path, "which attempts were interrupted"
        if not disk.is_there(path):
            return ()
        reason, lines = "", []
        try:
            lines = read_journal(path)
        except OSError as error:
            if disk.may_pass(error):
                raise StoreError(f"{what} cannot be known now: {path}: {error.strerror}") from error
            reason = str(error)
        table, damaged = reader.table_of_lines(lines)
        rows: dict[str, Mapping[str, Any]] = {}
        interrupted: set[str] = set()
        if begun := set(reader.row_keys(table)):
            look = reader.read_rows(self.tables_path, reader.ROW_KEY)
            look.refuse_unread(what)
            stored = set(reader.row_keys(look.table()))
            with_row = {attempt_id for _, attempt_id, *_ in stored}
            named = {line.row.get("attempt_id"): line.row for line in lines if line.row is not None}
            for key in begun:
                row = named[key[1]]
                if key[1] not in with_row:
                    interrupted.add(key[1])
                    rows[key[1]] = row
                elif key in stored:  # a predecessor has written it, then died in its turn
                    recovered = f"{row['job_id']}-{row['attempt_number'] + 1}"
                    interrupted |= set() if recovered in with_row else {key[1]}
        if rows:
            self._log.append(rows.values())
        if damaged or reason:
            aside = disk.set_aside(path, self.quarantine_path)
            _LOG.warning("set aside as %s: %s", aside, reason or damaged[0].reason)
        elif not interrupted:
            disk.remove(path)
        return tuple(sorted(interrupted))


# ---------------------------------------------------------------- finding a run


def find_run(run: str | os.PathLike[str] | None = None, results: Path | None = None) -> Store:
    """Return the store of a started run, by its name in ``results`` (None: the default place) or
    its path (None: the newest run); StoreError, with a list of runs, if there is none."""
    if run is not None and os.path.isdir(os.path.join(run, files.ROWS)):
        path = Path(os.path.realpath(run))
        return Store.existing(path.parent, path.name)
    results = results or files.default_results_dir()
    name = existing_runs(results)[0] if run is None else os.fspath(run)
    return Store.existing(results, name)


def existing_runs(results: Path) -> list[str]:
    """Names of the runs in a results directory, newest first; StoreError if there is none."""
    known = reader.runs(results)
    if not known:
        what = "there are no runs in" if os.path.isdir(results) else "there is no directory"
        raise StoreError(
            f"{what} {results}. Start a run with `nightgrid run GRID`, or say where runs are with "
            "--results DIR or NIGHTGRID_RESULTS."
        )
    return known
