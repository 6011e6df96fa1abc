"""Results on disk: rows go to a log first, and every few seconds into a Parquet file.

``paths.py`` names the files of a run, ``stored_run.py`` reads them.
A row is durable when ``append`` returns; ``to_parquet`` shows it to any reader. A writer of a big
run compacts it when it ends: many files become one. A *plain* reader may see rows twice for the
moment between the two; the pair (invocation_id, attempt_id) tells copies of a row. (An attempt that
was given up and brings its result after all has two rows that differ; the later one is never
final.)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from orchestrator.errors import StoreError, StoreFull
from orchestrator.results import disk, fragments, identity, paths
from orchestrator.results.append_log import AppendLog, is_log
from orchestrator.results.lock import SILENCE_S, Holder, RunLock
from orchestrator.results.row_file import record_of
from orchestrator.results.scan import ATTEMPT, Scan, replaced_by, scan_rows
from orchestrator.results.spilled import SpilledRows
from orchestrator.results.stored_run import StoredRun, runs

if TYPE_CHECKING:
    from orchestrator.domain.measurement import Measurement
    from orchestrator.results.begun import BegunLog
    from orchestrator.results.notes import Note

_LOG = logging.getLogger("nightgrid.store")
#: A writer that ends with this many files compacts them: ten thousand take a reader half a minute.
COMPACT_FROM = 200
_RESERVE_BYTES = 64 * 2**10


class Store(StoredRun):
    """The rows of one run, to read and to write.

    Reading needs nothing; ``with store:`` makes this process the run's one writer, sets aside
    what a crashed predecessor left torn, and gives the lock back at the end.
    """

    def __init__(self, results_dir: Path, run: str) -> None:
        super().__init__(results_dir, run)
        self.taken_over_from: Holder | None = None
        self.interrupted: tuple[str, ...] = ()  # attempts that a predecessor's death ended
        self.notes: tuple[str, ...] = ()  # about the run's id, for the user
        self._identity: identity.Identity | None = None
        self._adopts: tuple[str, ...] = ()  # former ids whose spilled rows come home
        self._spilled = SpilledRows(
            run=self.run,
            tables_path=self.tables_path,
            quarantine_path=self.quarantine_path,
            append=lambda name, data: self._log.append(name, data),
        )
        self._log = AppendLog(self.tables_path)
        self._logs_left: set[str] = set()  # that could not be read; said
        #: Records for which a file stands; None where that must be looked up.
        self._in_parquet: set[str] | None = None
        self._lock = RunLock(self.path)

    @classmethod
    def open(cls, results_dir: Path, run: str) -> Store:
        """The store of a run that may not exist yet; touches nothing.

        Raises:
            StoreError: the name cannot be that of a run.
        """
        return cls(results_dir, run)

    @classmethod
    def existing(cls, results_dir: Path, run: str) -> Store:
        """The store of a run that has been started.

        Raises:
            StoreError: there is none of this name; the message lists close matches.
        """
        store = cls(results_dir, run)
        if store.exists:
            return store
        known = runs(Path(results_dir))
        close = get_close_matches(run, known, n=3, cutoff=0.5) or known[:5]
        hint = f"There is: {', '.join(close)}." if close else "There are no runs there."
        raise StoreError(f"no run {run!r} in {results_dir}. {hint}")

    @property
    def rescued(self) -> int:
        """Number of rows recovered that an earlier driver had spilled to another disk."""
        return self._spilled.rescued

    # ------------------------------------------------------------ the one writer

    @cached_property
    def _begun(self) -> BegunLog:
        from orchestrator.results.begun import BegunLog  # here, since a plan needs no rows' columns

        return BegunLog(self.path / paths.BEGUN)

    def __enter__(self) -> Store:
        """Become the writer.

        Raises:
            StoreLocked: another driver holds the run; the message names it.
            StoreError: it cannot be told which attempts a predecessor's death ended.
        """
        try:
            disk.make_directory(self.tables_path)
            disk.sync_directory(self.path)
        except OSError as error:
            raise StoreError(f"cannot create {self.tables_path}: {error.strerror}") from error
        self.taken_over_from = self._lock.acquire()
        try:
            for damage in fragments.recover(self.tables_path, self.quarantine_path):
                _LOG.warning("set aside as %s: %s", damage.path, damage.reason)
            self._identity = identity.identify(self.path, self.quarantine_path)
            self._spilled.bring_home(self.run_id)
            for run_id in self._adopts:
                self._spilled.adopt(run_id, self._identity.former)
            waiting = self._spilled.told(self.path, self._identity.former)
            self.notes = (*self._identity.notes, *waiting)
            self.interrupted = self._record_interrupted()
            self._take_over_logs()
            with contextlib.suppress(StoreError):  # whoever writes rows will hear of it
                self.make_reserve()
        except BaseException:
            self._log.close()
            self._lock.release()
            raise
        return self

    def _take_over_logs(self) -> None:
        """Put what a dead driver left in a log into Parquet, if that is possible now."""
        logs = list(filter(is_log, disk.names(self.tables_path)))
        self._log.take_over(logs)
        self._in_parquet = None if logs else set()
        try:
            self.to_parquet()
        except Exception as problem:  # our reader finds them where they are
            _LOG.warning("rows of a log are not in Parquet: %s", str(problem) or repr(problem))

    def refuse_if_held(self) -> None:
        """Refuse as ``with store:`` would now, before anything is waited for that may be away.

        Raises:
            StoreLocked: another driver holds the run; the message names it.
            StoreError: the lock cannot be read.
        """
        self._lock.refuse_if_held()

    def resume(self) -> Store:
        """Let ``with store:`` take the run from a holder on another host, whose death cannot be
        seen from here, if it has given no sign of life for a minute."""
        self._lock.silence_means_death_s = SILENCE_S
        return self

    def adopt(self, *run_ids: str) -> Store:
        """Let ``with store:`` bring home the spilled rows of these run ids, too: of the directory
        that this one was copied from, and that is gone.

        Raises:
            StoreError: one is not a run id.
        """
        for run_id in run_ids:
            if not identity.is_run_id(run_id):
                raise StoreError(
                    f"{run_id[:80]!a} is not a run id, which has 12 hexadecimal digits"
                )
        self._adopts = run_ids
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ours = self._is_ours()
        try:
            if ours:
                self.to_parquet()
                if error is None and len(disk.names(self.tables_path)) >= COMPACT_FROM:
                    self.compact()
        except Exception as problem:  # a convenience; the rows are safe without it
            _LOG.warning("the rows were not compacted: %s", str(problem) or repr(problem))
        finally:
            self._log.close()
            ours = ours and self._is_ours()
            self._begun.close(ours=ours)
            if ours:
                with contextlib.suppress(OSError):
                    disk.remove(self._reserve)
            self._lock.release()

    def _is_ours(self) -> bool:
        try:
            self._lock.still_mine()
        except StoreError:
            return False
        return True

    def append(self, *measurements: Measurement) -> Path:
        """Write a row, or several as one record: all or none; the log that has them. When this
        returns, they survive a power failure. Safe to repeat with the same rows.

        Raises:
            StoreFull: no space is left; try again later.
            StoreLocked: the lock was taken away.
            StoreError: it cannot be written.
        """
        self._lock.still_mine()
        name, data = record_of(measurements)
        path = self._log.append(name, data)
        self._lock.still_mine()  # else our successor may have read the log before
        for measurement in measurements:
            self._begun.end(measurement.attempt_id)
        self._spilled.forget(name)
        if len(measurements) > 1 and self._spilled:
            for measurement in measurements:
                self._spilled.forget(record_of([measurement])[0])
        return path

    def to_parquet(self) -> Path | None:
        """Put the rows of the log into a Parquet file; None if there are none. Rows may be
        appended meanwhile, in another thread. What is torn or rotten is set aside.

        The file lists the records that it covers, so from the instant it appears our reader ignores
        those in the log; only then is the log removed. A driver that was stalled meanwhile leaves
        the logs to its successor.

        Raises:
            StoreError: not the writer, or the file cannot be written; the rows stay in the log.
        """
        self._lock.still_mine()
        contents = self._contents_of_logs()
        if not contents:
            return None
        from orchestrator.results.compaction import file_of_records, logged, spoiled

        kept = self._covered_records() if self._in_parquet is None else self._in_parquet
        scan = logged(self.tables_path, contents, kept)
        path = None
        if scan.tables:
            name, data = file_of_records(scan)
            self._in_parquet = None
            try:
                path = self._written_and_read(name, data)
            except Exception:
                with contextlib.suppress(OSError):  # else it may stand nevertheless
                    if name not in disk.names(self.tables_path):
                        self._in_parquet = kept
                raise
        kept |= scan.tables.keys()
        self._in_parquet = kept
        for log, content in contents.items():
            for part, rest in spoiled(log, content, kept).items():
                disk.make_directory(self.quarantine_path)
                aside = fragments.write_durably(self.quarantine_path, part, rest)
                _LOG.warning("set aside as %s: %s", aside, f"no sound row of {log}")
        self._lock.still_mine()
        for log in contents:
            self._delete([log])
            self._log.forget(log)
        return path

    def _covered_records(self) -> set[str]:
        """The records for which a file stands, those of logs that cannot be read now included.

        Raises:
            StoreError: a file cannot be read now, which may stand for some.
        """
        from orchestrator.results.compaction import leftovers

        what = "which records of a log are in a file"
        scan = self._attempts_for_good(what, logs=False)
        scan.covered = [name for table in scan.tables.values() for name in replaced_by(table)]
        return set(filter(fragments.is_record, leftovers(scan)))

    def _attempts_for_good(self, what: str, *, logs: bool = True) -> Scan:
        """All attempts, for what cannot be taken back; ``logs``: those in logs matter, too.

        Raises:
            StoreError: a file cannot be read now that may have others.
        """
        scan = scan_rows(self.tables_path, ATTEMPT)
        for damage in scan.damaged:
            if damage.path in scan.unread and (logs or not is_log(damage.path.name)):
                raise StoreError(
                    f"{what} cannot be told now: {damage.path}: {damage.reason}. Try again; if it "
                    f"stays so, move the file to {self.quarantine_path}"
                )
        return scan

    def _contents_of_logs(self) -> dict[str, bytes]:
        """The contents of our logs, by name; they are ended. Each is read once, whole: a row that
        one look misses and another one finds would pass for damaged. One that cannot be read now
        is left as it is, and said once: the others wait for none.
        """
        found = {}
        for log in self._log.rotate():
            path = self.tables_path / log
            try:
                found[log] = disk.read(path)
            except FileNotFoundError:
                self._log.forget(log)
                _LOG.error("%s was removed by somebody else, with its rows", path)
            except OSError as error:
                if log not in self._logs_left:
                    why = error.strerror or error
                    _LOG.warning("%s cannot be read, its rows are not in Parquet: %s", path, why)
                self._logs_left.add(log)
        return found

    @property
    def _reserve(self) -> Path:
        return self.path / paths.RESERVE

    def make_reserve(self) -> None:
        """Reserve some space, so that ``status.json`` can still report a disk that gets full.

        Raises:
            StoreFull: there is none.
            StoreError: it cannot be written.
        """
        if not disk.is_there(self._reserve):
            fragments.replace_file(self.path, self._reserve.name, bytes(_RESERVE_BYTES))

    def spill(self, measurement: Measurement) -> Path | None:
        """Write a row that finds no room where it belongs on another disk of this host, from where
        the run's next driver here fetches it; None if there is no room there either."""
        return self._spilled.write(self.run_id, *record_of([measurement]))

    def begin(self, *notes: Note) -> None:
        """Note that attempts start, so that they have rows should this process die before
        ``append`` has written their own. Survives the death of the process, not that of the
        machine.

        Raises:
            StoreFull: no space is left.
            StoreError: it cannot be written.
        """
        self._lock.still_mine()
        self._begun.begin(notes)

    def _record_interrupted(self) -> tuple[str, ...]:
        """Make rows of what a dead predecessor had running; the ids of those attempts."""
        from orchestrator.results.begun import read_begun

        path = self._begun.path
        if not disk.is_there(path):
            return ()
        try:
            begun, reason = read_begun(path)
        except OSError as error:
            begun, reason = [], str(error)
        what = "which attempts were interrupted"
        known = self._attempts_for_good(what).attempts() if begun else set()
        lost = [row for row in begun if (row.job_id, row.attempt_number) not in known]
        if lost:
            self.append(*lost)
        if reason:
            damage = fragments.set_aside(path, self.quarantine_path)
            _LOG.warning("set aside as %s: %s", damage, reason)
        else:
            disk.remove(path)
        return tuple(sorted(row.attempt_id for row in lost))

    @property
    def run_id(self) -> str:
        """The id that all drivers of this run have, and no other run. For the writer.

        Raises:
            StoreError: this process is not the writer.
        """
        if self._identity is None:
            raise StoreError(f"{self.path} is not open for writing: its run id is not known")
        return self._identity.run_id

    def write_file(self, name: str, content: str | bytes) -> Path:
        """Replace a side file of the run (report, status, grid) in one step.

        Raises:
            StoreError: the name could lead out of the run's directory, or writing fails.
        """
        fragments.valid_name(name, "file name")
        data = content.encode() if isinstance(content, str) else content
        disk.make_directory(self.path)
        try:
            return fragments.replace_file(self.path, name, data)
        except StoreFull:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(self._reserve)
            return fragments.replace_file(self.path, name, data)

    def compact(self) -> Path | None:
        """Put all sound files into one; None when there is nothing to gain. A file that holds
        something else than rows stays where it is.

        The new file lists the files that it covers, so from the instant it appears our reader
        ignores them; only then are they deleted. A crash in between leaves leftovers that the next
        compaction deletes.

        Raises:
            StoreError: not the writer, or the new file does not read back.
        """
        from orchestrator.results.compaction import compacted, leftovers
        from orchestrator.results.schema import column_names

        self.to_parquet()
        scan = scan_rows(self.tables_path, column_names())
        if scan.unread and any(map(fragments.is_record, scan.tables)):
            raise StoreError(f"{scan.unread[0]} cannot be read now; it may hold rows of a log")
        self._delete(leftovers(scan))
        if len(scan.tables) < 2:
            return None
        self._in_parquet = None  # records of a log that stays are in the file now
        path = self._written_and_read(*compacted(scan))
        self._delete(scan.tables)
        return path

    def _written_and_read(self, name: str, data: bytes) -> Path:
        """Write a file that stands for others.

        Raises:
            StoreError: it does not read back.
        """
        # A driver that was stalled while it wrote may have a successor that did the same.
        still_mine = self._lock.still_mine
        path = fragments.write_durably(self.tables_path, name, data, still_mine)
        if disk.read(path) != data:
            disk.remove(path)
            raise StoreError(f"{path} does not read back as written; what it replaces was kept")
        return path

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(self.tables_path / name)
        disk.sync_directory(self.tables_path)
