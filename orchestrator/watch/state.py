"""The state of a run, read from its files as JSON values.

``status.json`` and the rows may be half written, of another version, or briefly missing; then the
last good state stays, with a note. Silence is measured by the local steady clock once the status
was seen to change, and before that against the driver's clock.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.summary import STALE_AFTER_S, progress, stopped_sentence
from orchestrator.core.errors import StoreError
from orchestrator.core.job import Scalar, State
from orchestrator.core.labels import Label, Named, labels_of
from orchestrator.core.status import RunStatus
from orchestrator.report.run_report import current_status, read_status, read_summary
from orchestrator.report.wording import answers
from orchestrator.store import disk
from orchestrator.store import files as run_files
from orchestrator.store.reader import read_rows
from orchestrator.store.store import Store, existing_runs
from orchestrator.util.format import duration, number, one_line, plural, seconds
from orchestrator.watch.live import best_text, half_width_text, left_text
from orchestrator.watch.plan_text import aligned
from workloads.util.files import SMALL_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestrator.on_ray.jobs import JobInfo

Row = dict[str, Any]

#: Rows shown, the newest first; the report has all.
NEWEST_ROWS = 20
REASON_LENGTH = 300
READING_PATIENCE_S = 2.0
_NAMING = tuple(field.name for field in dataclasses.fields(Named))
_COLUMNS = (
    *(*_NAMING, "state", "final", "reason", "failure_class", "nodes", "card_indices", "emulated"),
    *("throughput", "throughput_unit", "relative_half_width", "recorded_at"),
)


class RunFeed:
    """State of one run, read on request; not thread-safe. The clock ``steady`` never jumps."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._steady = steady
        self._text = ""
        self._last: RunStatus | None = None  # that was understood
        self.status: RunStatus | None = None  # as the last snapshot has it
        self._status_trouble = ""
        self._changed_at: float | None = None  # by the steady clock; None: no change seen
        self._tables: Mapping[str, pa.Table] = {}
        self._counts: dict[str, int] = {}  # of rows, by file
        self._of_file: dict[str, list[Row]] = {}
        self._rows: list[Row] = []
        self._labels: Mapping[str, Label] = {}  # by job id
        self._damaged = 0
        self._rows_trouble = ""
        self._reader: threading.Thread | None = None

    def snapshot(self) -> dict[str, Any]:
        """Return the run's state for the page."""
        self._read_status()
        # In a thread: the first of thousands of row files must not delay the status.
        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=self._read_rows, daemon=True)
            self._reader.start()
        self._reader.join(READING_PATIENCE_S)
        now, status, silent_s = self._clock(), self._last, 0.0
        if status is not None:
            silent_s = max(0.0, now - status.at)
            if self._changed_at is not None:
                silent_s = self._steady() - self._changed_at
            status = current_status(status, self._store.path)
        self.status = status
        report = self._store.path / run_files.REPORT
        return {
            "run": self._store.run,
            "now": now,
            "silent_s": silent_s,
            "stale": status is not None and not status.finished and silent_s > STALE_AFTER_S,
            "sentence": self._sentence(status, silent_s),
            "trouble": [text for text in (self._status_trouble, self._rows_trouble) if text],
            "reading": self._reader.is_alive(),
            "emulated": any(row["emulated"] for row in self._rows)
            or (status is not None and status.emulated),
            "status": None if status is None else _status_values(status),
            "rows": [
                _row_values(row, self._labels[row["job_id"]]) for row in self._rows[:NEWEST_ROWS]
            ],
            "row_count": len(self._rows),
            # The driver counts this invocation only; rows may be of earlier ones.
            "states": _final_states(self._rows) if status is None else dict(status.counts),
            "damaged": self._damaged,
            "report": os.path.isfile(report) and not os.path.islink(report),
        }

    def _read_status(self) -> None:
        self._status_trouble = ""
        try:
            text = disk.read(self._store.path / run_files.STATUS, SMALL_BYTES).decode()
            if text != self._text:
                if self._text:
                    self._changed_at = self._steady()
                self._text = text
                self._last = RunStatus.from_json(text)
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            self._status_trouble = f"status.json cannot be read: {error}"
        except ValueError as error:
            self._status_trouble = f"status.json is not understood: {error}"

    def _read_rows(self) -> None:
        try:
            look = read_rows(self._store.tables_path, _COLUMNS, self._tables)
        except (StoreError, OSError) as error:
            self._rows_trouble = str(error)
            return
        self._rows_trouble = ""
        self._damaged = len(look.damaged)
        counts = {name: table.num_rows for name, table in look.tables.items()}
        if counts == self._counts:
            return
        self._tables, self._counts = look.tables, counts
        # Known row files do not change, and a night has thousands; logs grow.
        self._of_file = {
            name: (name.endswith(".parquet") and self._of_file.get(name)) or table.to_pylist()
            for name, table in look.tables.items()
        }
        every = itertools.chain.from_iterable(self._of_file.values())
        rows = sorted(every, key=_recorded_at, reverse=True)
        # Set before the rows, with labels of removed rows: a snapshot may come in between.
        self._labels = {**self._labels, **_labels(rows)}
        self._rows = rows

    def _sentence(self, status: RunStatus | None, silent_s: float) -> str:
        if status is None:
            rows = plural(len(self._rows), "row")
            return f"No driver has written a status for this run; it has {rows}."
        if not status.finished:
            return progress(status, silent_s)
        took = seconds(status.elapsed_s)
        if status.stopping:
            why = one_line(status.stopping, REASON_LENGTH)
            return stopped_sentence(why, status.measured, status.total)
        return f"Finished: {status.done:,} of {plural(status.total, 'job')} done in {took}."


def _status_values(status: RunStatus) -> dict[str, Any]:
    """Return the status with derived values and sanitised reasons."""
    values = dataclasses.asdict(status)
    values |= {"assigned": status.assigned, "jobs_per_h": status.jobs_per_h}
    for answer, own in zip(values["answers"], status.answers, strict=True):
        answer |= {"sentence": own.sentence, "basis": own.basis}
    for failure in values["failures"]:
        failure["reason"] = one_line(failure["reason"], REASON_LENGTH)
    return values


def _labels(rows: Iterable[Row]) -> dict[str, Label]:
    """Return the label of each job, as in the report; ``rows`` are newest first."""
    chosen: dict[str, Row] = {}
    for row in rows:
        known = chosen.setdefault(row["job_id"], row)
        if row["final"] and not known["final"]:
            chosen[row["job_id"]] = row
    shared: dict[tuple[tuple[str, str], ...], dict[str, Scalar]] = {}  # few serve all jobs
    named = []
    for row in chosen.values():
        pairs = tuple(row["parameters"] or ())
        if pairs not in shared:
            shared[pairs] = {name: json.loads(text) for name, text in pairs}
        named.append(Named(**{n: row[n] for n in _NAMING} | {"parameters": shared[pairs]}))
    return labels_of(named)


def _row_values(row: Row, label: Label) -> dict[str, Any]:
    nodes, indices = row["nodes"] or [], row["card_indices"] or []
    where = ""
    if nodes:
        where = f"{nodes[0]}/{row['accelerator']}{indices[0]}" if indices else str(nodes[0])
        where += f" and {len(indices) - 1} more" * (len(indices) > 1)
    figure = ""
    if row["throughput"] is not None:
        figure = f"{number(row['throughput'])} {row['throughput_unit']}"
        figure += half_width_text(row["relative_half_width"])
    reason = row["reason"] or row["failure_class"] or ""
    return {
        "at": _recorded_at(row) or None,
        "state": row["state"],
        "final": row["final"],
        "job": one_line(str(label), REASON_LENGTH),
        "where": one_line(where),
        "figure": figure,
        "reason": "" if row["state"] == State.SUCCEEDED else one_line(reason, REASON_LENGTH),
    }


def _final_states(rows: Iterable[Row]) -> dict[str, int]:
    newest: dict[str, str] = {}
    for row in rows:  # newest first
        if row["final"]:
            newest.setdefault(row["job_id"], row["state"])
    return dict(Counter(newest.values()))


def _recorded_at(row: Row) -> float:
    return row["recorded_at"].timestamp() if row["recorded_at"] is not None else 0.0


# The runs of a results directory, a line each: state, progress, time left, fastest setting.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run as a list shows it."""

    run: str
    state: str  # ``state_of``; "" without a status
    done: int | None = None  # jobs that have ended
    total: int | None = None
    succeeded: int | None = None  # jobs with a figure; None: unknown
    eta_s: float | None = None
    eta_low_s: float | None = None  # its range, while uncertain
    eta_high_s: float | None = None
    at: float | None = None  # time of the driver's last status, seconds since the epoch
    note: str = ""  # why it waits, was stopped or is in trouble
    best: str = ""  # the first answer of its report


def state_of(status: RunStatus) -> str:
    """Return the state of a run in one word."""
    if status.driver_died:
        return "DIED"
    if status.finished:
        return "STOPPED" if status.stopping else "FINISHED"
    if status.stopping:
        return "STOPPING"
    if status.paused:
        return "PAUSED"
    return "WAITING" if status.waiting else "RUNNING"


def run_entries(results: Path, most: int) -> list[RunEntry]:
    """Return the newest runs, last written first; raise StoreError if there is none."""
    entries = []
    for run in existing_runs(results)[:most]:
        store = Store.existing(results, run)
        best, note = "", ""
        try:
            summary, _ = read_summary(store, lean=True)
            best = "".join(answers(summary)[:1])
        except StoreError as error:
            note = str(error).splitlines()[0]
        entry = RunEntry(run=run, state="", best=best, note=note)
        if (status := read_status(store)) is not None:
            entry = entry_by_status(run, status)
            entry = replace(entry, best=best, note=note or entry.note)
        entries.append(entry)
    return entries


def entry_by_status(run: str, status: RunStatus) -> RunEntry:
    """The entry of a run by its driver's status alone."""
    return RunEntry(
        run=run,
        state=state_of(status),
        done=status.done,
        total=status.total,
        succeeded=status.measured,
        eta_s=None if status.finished else status.eta_s,
        eta_low_s=status.eta_low_s,
        eta_high_s=status.eta_high_s,
        at=status.at,
        note=status.stopping or status.waiting or status.paused or status.trouble,
        best="".join(map(best_text, status.best[:1])),
    )


def with_sent(entries: Sequence[RunEntry], jobs: Iterable[JobInfo]) -> list[RunEntry]:
    """Add submitted jobs whose driver has not reported; resubmitted ones keep the old state."""
    spoken = {entry.run: entry.at for entry in entries if entry.state}
    sent: dict[str, RunEntry] = {}
    for job in jobs:
        if not job.run or job.run in sent:
            continue
        at, started = spoken.get(job.run), job.started_at or math.inf
        if job.run in spoken and (job.over or at is None or started <= at):
            continue
        note = ""
        if job.over:
            last_line = (job.message.strip().splitlines() or ["it said nothing"])[-1]
            note = f"{last_line}; nightgrid logs {job.submission_id} has more"
        state = job.status if job.over else "STARTING"
        sent[job.run] = RunEntry(run=job.run, state=state, at=job.started_at, note=note)
    return [*sent.values(), *(entry for entry in entries if entry.run not in sent)]


#: States after which no job of a run ends.
_ENDED = frozenset({"FINISHED", "STOPPED", "DIED"})


def entry_lines(entries: Sequence[RunEntry], now: float) -> list[str]:
    """Return the list as a table, with winner and note below each run."""
    rows = [("run", "state", "jobs", "time left", "last heard of")]
    below: list[list[str]] = [[]]
    for entry in entries:
        jobs = "" if entry.total is None else f"{entry.done}/{entry.total}"
        if entry.state in _ENDED and entry.succeeded is not None:
            jobs = f"{entry.succeeded} of {entry.total} succeeded"
        left = ""
        if entry.eta_s is not None:
            left = left_text(entry.eta_s, entry.eta_low_s, entry.eta_high_s)
        heard = "" if entry.at is None else f"{duration(now - entry.at)} ago"
        rows.append((entry.run, entry.state or "?", jobs, left, heard))
        below.append([text for text in (entry.best, entry.note) if text])
    columns = [(heading, texts) for heading, *texts in zip(*rows, strict=True)]
    lines = []
    for line, texts in zip(aligned(columns), below, strict=True):
        lines += [line, *(f"    {text}" for text in texts)]
    return lines


def entry_of(values: Mapping[str, Any]) -> RunEntry:
    """Parse an entry from JSON values."""
    names = [field.name for field in dataclasses.fields(RunEntry) if field.name in values]
    return RunEntry(**{name: values[name] for name in names})
