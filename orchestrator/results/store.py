"""Results on disk: rows go to a log first, and every few seconds into a Parquet file.

``paths.py`` names the files of a run, ``stored_run.py`` reads them, ``row_files.py`` writes those
of rows. A row is durable when ``append`` returns; ``to_parquet`` shows it to any reader. A writer
of a big run compacts it when it ends: many files become one. A *plain* reader may see rows twice
for the moment between the two; the pair (invocation_id, attempt_id) tells copies of a row. (An
attempt that was given up and brings its result after all has two rows that differ; the later one is
never final.)
"""

from __future__ import annotations

import contextlib
import logging
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, fragments, identity, paths
from orchestrator.results.lock import SILENCE_S, Holder, RunLock
from orchestrator.results.row_files import RowFiles, record_of
from orchestrator.results.side_files import SideFiles
from orchestrator.results.spilled import SpilledRows
from orchestrator.results.stored_run import StoredRun, no_such_run

if TYPE_CHECKING:
    from orchestrator.core.measurement import Measurement
    from orchestrator.results.append_log import AppendLog
    from orchestrator.results.begun import BegunLog
    from orchestrator.results.notes import Note

_LOG = logging.getLogger("nightgrid.store")
#: A writer that ends with this many files compacts them: ten thousand take a reader half a minute.
COMPACT_FROM = 200


class Store(StoredRun):
    """The rows of one run, to read and to write.

    Reading needs nothing; ``with store:`` makes this process the run's one writer, sets aside
    what a crashed predecessor left torn, and gives the lock back at the end.

    Args:
        lock: of the run; its own if left out.
        log: to which rows are appended; one of a new name if left out.
    """

    def __init__(
        self,
        results_dir: Path,
        run: str,
        *,
        lock: RunLock | None = None,
        log: AppendLog | None = None,
    ) -> None:
        super().__init__(results_dir, run)
        self.taken_over_from: Holder | None = None
        self.interrupted: tuple[str, ...] = ()  # attempts that a predecessor's death ended
        self.notes: tuple[str, ...] = ()  # about the run's id, for the user
        self._identity: identity.Identity | None = None
        self._adopts: tuple[str, ...] = ()  # former ids whose spilled rows come home
        self._lock = lock or RunLock(self.path)
        self._beside = SideFiles(self.path)
        self._files = RowFiles(self.tables_path, self.quarantine_path, self._still_mine, log)
        self._spilled = SpilledRows(
            run=self.run,
            tables_path=self.tables_path,
            quarantine_path=self.quarantine_path,
            append=self._files.append_record,
        )

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
        if not store.exists:
            raise no_such_run(Path(results_dir), run)
        return store

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
            StoreError: it cannot be told which attempts a predecessor's death ended, or anything
                else the file system says.
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
            self._files.take_over()
            with contextlib.suppress(StoreError):  # whoever writes rows will hear of it
                self.make_reserve()
        except BaseException as error:
            self._files.close()
            self._lock.release()
            if isinstance(error, OSError):  # of a listing, a removal, a file that is set aside
                where = error.filename or self.path
                what = f"{self.path} cannot be opened for writing: {where}"
                raise StoreError(f"{what}: {error.strerror or error}") from error
            raise
        return self

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
            self._files.close()
            ours = ours and self._is_ours()
            self._begun.close(ours=ours)
            if ours:
                self._beside.remove_reserve()
            self._lock.release()

    def _is_ours(self) -> bool:
        try:
            self._still_mine()
        except StoreError:
            return False
        return True

    def _still_mine(self) -> None:
        self._lock.still_mine()

    def append(self, *measurements: Measurement) -> Path:
        """Write a row, or several as one record: all or none; the log that has them. When this
        returns, they survive a power failure. Safe to repeat, with the same rows or with some of
        them and others: no row is two, though one whose append failed may stand nevertheless.

        Raises:
            StoreFull: no space is left; try again later.
            StoreLocked: the lock was taken away.
            StoreError: it cannot be written.
        """
        path = self._files.append(measurements)
        self._begun.end(measurement.attempt_id for measurement in measurements)
        if self._spilled:
            for measurement in measurements:
                self._spilled.forget(record_of([measurement])[0])
        return path

    def to_parquet(self) -> Path | None:
        """Put the rows of the log into a Parquet file; None if there are none. Rows may be
        appended meanwhile, in another thread. What is torn or rotten is set aside. A driver that
        was stalled meanwhile leaves the logs to its successor.

        Raises:
            StoreError, OSError: not the writer, or the file cannot be written, or what it stands
                for not removed; the rows are safe, in the log or in both.
        """
        return self._files.to_parquet()

    def make_reserve(self) -> None:
        """Reserve some space for ``status.json``; raises StoreFull if there is none."""
        self._beside.make_reserve()

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

        path, what = self._begun.path, "which attempts were interrupted"
        if not disk.is_there(path):
            return ()
        try:
            begun, reason = read_begun(path)
        except OSError as error:
            if fragments.may_pass(error):
                raise StoreError(f"{what} cannot be told now: {path}: {error.strerror}") from error
            begun, reason = [], str(error)
        lost = self._files.without_row(begun, what) if begun else []
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
        return self._beside.write(name, content)

    def compact(self) -> Path | None:
        """Put all sound files into one; None when there is nothing to gain. A file that holds
        something else than rows stays where it is.

        Raises:
            StoreError, OSError: not the writer, or the new file does not read back, or what it
                stands for cannot be removed.
        """
        return self._files.compact()
