"""A run's rows as any reader sees them, who needs no lock and may read while a run writes.

Every file is verified, damage is reported (``Contents.damaged``), and each row is seen once, also
while the writer (``store.py``) replaces a log or many files by one file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import StoreError
from orchestrator.core.plan import PastRow
from orchestrator.results import disk, fragments, paths
from orchestrator.results.fragments import Damage
from orchestrator.results.past_rows import past_rows
from orchestrator.results.scan import Scan, scan_rows

if TYPE_CHECKING:
    from orchestrator.core.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that a run's directory holds: the rows in the order of recording, and what is damaged."""

    measurements: tuple[Measurement, ...]
    damaged: tuple[Damage, ...]


def runs(results_dir: Path) -> list[str]:
    """Names of the runs in a results directory, the one written last first.

    Raises:
        StoreError: the directory is there and cannot be read.
    """
    try:
        names = disk.names(results_dir)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a NUL in the name
        return []
    except OSError as error:
        raise StoreError(f"{results_dir} cannot be read: {error.strerror or error}") from error
    written: dict[str, float] = {}
    for name in names:  # os.path, since Path's own questions raise where it may not look
        rows = results_dir / name / paths.ROWS
        with contextlib.suppress(OSError):
            if os.path.isdir(rows):
                written[name] = os.stat(rows).st_mtime
    return sorted(written, key=lambda name: written[name], reverse=True)


def no_such_run(results_dir: Path, run: str) -> StoreError:
    """The error for a run that is not there; its message lists close matches."""
    known = runs(results_dir)
    close = get_close_matches(run, known, n=3, cutoff=0.5) or known[:5]
    hint = f"There is: {', '.join(close)}." if close else "There are no runs there."
    return StoreError(f"no run {run!r} in {results_dir}. {hint}")


class StoredRun:
    """The directory of one run. Touches nothing.

    Raises:
        StoreError: the name cannot be that of a run, or its directory leads elsewhere.
    """

    def __init__(self, results_dir: Path, run: str) -> None:
        self.run = fragments.valid_name(run, "run name")
        self.path = Path(results_dir) / self.run
        self.tables_path = self.path / paths.ROWS
        self.quarantine_path = self.path / paths.QUARANTINE
        for path in (self.path, self.tables_path, self.quarantine_path, self.path / paths.LOGS):
            # os.path.realpath, since Path.resolve raises where links go round in a circle
            if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(results_dir)):
                raise StoreError(f"{path} leads out of {results_dir}; link the latter instead")

    @property
    def exists(self) -> bool:
        """Return whether the run was ever started."""
        return os.path.isdir(self.tables_path)

    def read(self, *, samples: bool = True) -> Contents:
        """Every sound row, and every damaged file, those set aside earlier included.

        Raises:
            SchemaMismatch: a row was written by a newer version.
        """
        from orchestrator.results.schema import column_names

        scan = scan_rows(self.tables_path, column_names(raw=samples))
        rows = tuple(_measurements(scan))
        earlier = fragments.set_aside_earlier(self.quarantine_path)
        return Contents(measurements=rows, damaged=(*scan.damaged, *earlier))

    def measurements(self, samples: bool = True) -> list[Measurement]:
        """The rows in the order of recording; without ``samples`` it is faster."""
        return list(self.read(samples=samples).measurements)

    def attempts_set_aside(self, job_ids: Iterable[str]) -> dict[str, int]:
        """The highest number, by job id, of an attempt at one of these jobs whose row may be among
        the damaged ones: no other attempt may be called the same."""
        numbers: dict[str, int] = {}
        for damage in fragments.set_aside_earlier(self.quarantine_path):
            if attempt := fragments.attempt_of(damage.path.name):
                numbers[attempt[0]] = max(attempt[1], numbers.get(attempt[0], 0))
        of_any = numbers.pop(fragments.TOGETHER, 0)
        return {job_id: most for job_id in job_ids if (most := max(of_any, numbers.get(job_id, 0)))}

    def history(self) -> list[PastRow]:
        """The columns of each row that planning and estimating need, oldest first."""
        return past_rows(self.tables_path)


def _measurements(scan: Scan) -> list[Measurement]:
    """The rows of a scan in the order of recording."""
    from orchestrator.results.tables import from_table

    rows = from_table(scan.joined(), source=str(scan.directory)) if scan.tables else []
    rows.sort(key=lambda row: (row.recorded_at or 0.0, row.attempt_id, row.invocation_id))
    return rows
