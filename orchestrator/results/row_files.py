"""The files of rows that one writer makes: its log, Parquet of what is in it, and one for all.

A row is safe in the log. A Parquet file lists the records that it stands for, so from the instant
it appears our reader ignores those in a log; only then is the log removed. Likewise a compacted
file lists the files that it stands for, and a crash in between leaves leftovers that the next
compaction deletes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import StoreError
from orchestrator.results import disk, fragments
from orchestrator.results.append_log import AppendLog, is_log
from orchestrator.results.complete import refuse_unread
from orchestrator.results.scan import ATTEMPT, Scan, replaced_by, scan_rows

if TYPE_CHECKING:
    from orchestrator.core.measurement import Measurement

_LOG = logging.getLogger("nightgrid.store")


def record_of(rows: Sequence[Measurement]) -> tuple[str, bytes]:
    """Name and content of a record (``record.py``).

    Raises:
        StoreError: a value does not fit its column, or a job's id cannot be part of a name.
        MemoryError, OSError, ImportError: try again.
    """
    from orchestrator.results import record  # here: a plan needs no rows' columns

    return record.record_of(rows)


class RowFiles:
    """The files of rows of one run, for its one writer.

    Args:
        directory: of the run's rows.
        quarantine: where what is torn or rotten goes.
        still_mine: asked before anything appears or goes; it raises a StoreError for a driver that
            has lost the run.
        log: that rows are appended to; one of a new name if left out.
    """

    def __init__(
        self,
        directory: Path,
        quarantine: Path,
        still_mine: Callable[[], object],
        log: AppendLog | None = None,
    ) -> None:
        self._directory = directory
        self._quarantine = quarantine
        self._still_mine = still_mine
        self._log = log or AppendLog(directory)
        self._making = threading.Lock()  # held while records become a file
        self._logs_left: set[str] = set()  # that could not be read; said
        #: Records that stand, or may, although their append failed, and the rows in each.
        self._unsettled: dict[str, set[str]] = {}
        #: Records for which a file stands; None where that must be looked up.
        self._in_parquet: set[str] | None = None

    def append(self, rows: Sequence[Measurement]) -> Path:
        """Write rows to the log as one record; the log. When this returns, they survive a power
        failure. Rows of an append that failed may come again in any company.

        Raises:
            StoreFull: no space is left; the log is as it was.
            StoreError: not the writer, or anything else the file system says.
        """
        self._still_mine()
        name, data = record_of(rows)
        if self._unsettled:
            left = self._settled(rows, name)
            if not left:
                return self._directory
            if len(left) < len(rows):
                rows, (name, data) = left, record_of(left)
        path = None
        try:
            path = self._log.append(name, data)
            self._still_mine()  # else our successor may have read the log before
        except StoreError:
            if path is not None or self._log.doubts(name):
                self._unsettled[name] = {record_of([row])[0] for row in rows}
            raise
        self._unsettled.pop(name, None)
        return path

    def append_record(self, name: str, data: bytes) -> Path:
        """Write to the log a record that was made before."""
        return self._log.append(name, data)

    def _settled(self, rows: Sequence[Measurement], name: str) -> list[Measurement]:
        """Those of some rows, to be written as the record of this name, that are not safe. Another
        record that has some of them, and is not safe either, is taken back.

        Raises:
            StoreError: that cannot be done now.
        """
        left = {record_of([row])[0]: row for row in rows}
        for record, theirs in list(self._unsettled.items()):
            if record == name or theirs.isdisjoint(left):
                continue
            with self._making:  # else it might become Parquet meanwhile
                if not self._is_safe(record):
                    self._log.take_back(record)
                    del self._unsettled[record]
                    continue
            for row in theirs & left.keys():
                theirs.remove(row)  # of the rest we may hear later
                del left[row]
        return list(left.values())

    def _is_safe(self, record: str) -> bool:
        """Return whether a record whose append failed is Parquet by now, or the log was not what
        failed."""
        if self._in_parquet is None:
            self._in_parquet = self._covered_records()
        return record in self._in_parquet or not self._log.doubts(record)

    def take_over(self) -> None:
        """Put what a dead driver left in a log into Parquet, if that is possible now."""
        logs = list(filter(is_log, disk.names(self._directory)))
        self._log.take_over(logs)
        self._in_parquet = None if logs else set()
        try:
            self.to_parquet()
        except Exception as problem:  # our reader finds them where they are
            _LOG.warning("rows of a log are not in Parquet: %s", str(problem) or repr(problem))

    def close(self) -> None:
        """End the log."""
        self._log.close()

    # ------------------------------------------------------------ Parquet

    def to_parquet(self) -> Path | None:
        """Put the rows of the log into a Parquet file; None if there are none. Rows may be
        appended meanwhile, in another thread. What is torn or rotten is set aside.

        Raises:
            StoreError, OSError: not the writer, or the file cannot be written, or what it stands
                for not removed; the rows are safe, in the log or in both.
        """
        with self._making:
            self._still_mine()
            fragments.remove_given_up(self._directory)
            contents = self._contents_of_logs()
            return self._parquet_of(contents) if contents else None

    def _parquet_of(self, contents: dict[str, bytes]) -> Path | None:
        """A file for the records of logs, which are removed: None if there are no sound ones."""
        from orchestrator.results.compaction import file_of_records, logged, spoiled

        kept = self._covered_records() if self._in_parquet is None else self._in_parquet
        scan = logged(self._directory, contents, kept)
        path = None
        if scan.tables:
            name, data = file_of_records(scan)
            self._in_parquet = None
            try:
                path = self._written_and_read(name, data)
            except Exception:
                with contextlib.suppress(OSError):  # else it may stand nevertheless
                    if name not in disk.names(self._directory):
                        self._in_parquet = kept
                raise
        kept |= scan.tables.keys()
        self._in_parquet = kept
        for log, content in contents.items():
            for part, rest in spoiled(log, content, kept).items():
                disk.make_directory(self._quarantine)
                aside = fragments.write_durably(self._quarantine, part, rest)
                _LOG.warning("set aside as %s: %s", aside, f"no sound row of {log}")
        self._still_mine()
        for log in contents:
            self._delete([log])
            self._log.forget(log)
        return path

    def _covered_records(self) -> set[str]:
        """The records for which a file stands, those of logs that cannot be read now included. The
        names of those files survive a power failure.

        Raises:
            StoreError: a file cannot be read now, which may stand for some, or the names of files
                cannot be made safe now.
        """
        from orchestrator.results.compaction import leftovers

        try:
            disk.sync_directory(self._directory)  # where it failed, a file stands nevertheless
        except OSError as error:
            raise fragments.write_error(self._directory, error) from error
        what = "which records of a log are in a file"
        scan = self._attempts_for_good(what, logs=False)
        scan.covered = [name for table in scan.tables.values() for name in replaced_by(table)]
        return set(filter(fragments.is_record, leftovers(scan)))

    def without_row(self, attempts: Iterable[Measurement], what: str) -> list[Measurement]:
        """Those of some attempts that have no row. ``what`` is told so, for people.

        Raises:
            StoreError: a file cannot be read now that may have some.
        """
        known = self._attempts_for_good(what).attempts()
        return [row for row in attempts if (row.job_id, row.attempt_number) not in known]

    def _attempts_for_good(self, what: str, *, logs: bool = True) -> Scan:
        """All attempts, for what cannot be taken back; ``logs``: those in logs matter, too.

        Raises:
            StoreError: a file cannot be read now that may have others.
        """
        scan = scan_rows(self._directory, ATTEMPT)
        for damage in scan.unread:
            if logs or not is_log(damage.path.name):
                raise StoreError(
                    f"{what} cannot be told now: {damage.path}: {damage.reason}. Try again; if it "
                    f"stays so, move the file to {self._quarantine}"
                )
        return scan

    def _contents_of_logs(self) -> dict[str, bytes]:
        """The contents of our logs, by name; they are ended. Each is read once, whole: a row that
        one look misses and another one finds would pass for damaged. One that cannot be read now
        is left as it is, and said once: the others wait for none.
        """
        found = {}
        for log in self._log.rotate():
            path = self._directory / log
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

    # ------------------------------------------------------------ compaction

    def compact(self) -> Path | None:
        """Put all sound files into one; None when there is nothing to gain. A file that holds
        something else than rows stays where it is.

        Raises:
            StoreError, OSError: not the writer, or the new file does not read back, or what it
                stands for cannot be removed.
        """
        from orchestrator.results.compaction import compacted, leftovers
        from orchestrator.results.schema import column_names

        self.to_parquet()
        scan = scan_rows(self._directory, column_names())
        refuse_unread(scan, "what is to be compacted")
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
        path = fragments.write_durably(self._directory, name, data, self._still_mine)
        if disk.read(path) != data:
            disk.remove(path)
            # Without its name, which is gone: each try has another, and a cause is said once.
            what = f"a new file in {self._directory} does not read back as written"
            raise StoreError(f"{what}; what it replaces was kept")
        return path

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(self._directory / name)
        disk.sync_directory(self._directory)
