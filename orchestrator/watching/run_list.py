"""The runs of a results directory, each in a line: state, progress, time left, fastest setting."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import StoreError
from orchestrator.results.finding import existing_runs
from orchestrator.results.store import Store
from orchestrator.runtime.status import RunStatus

if TYPE_CHECKING:
    from orchestrator.on_ray.jobs import JobInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run as a list shows it."""

    run: str
    state: str  # ``state_of``; "" where no driver has said anything
    done: int | None = None  # jobs that have ended
    total: int | None = None
    eta_s: float | None = None
    eta_low_s: float | None = None  # the range that it is in, while little of the run is done
    eta_high_s: float | None = None
    at: float | None = None  # when its driver last spoke, seconds since the epoch
    note: str = ""  # why it waits, was stopped or is in trouble
    best: str = ""  # the fastest setting of its first contest


def state_of(status: RunStatus) -> str:
    """The state of a run in one word."""
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
    """The newest runs of a directory, the one written last first.

    Raises:
        StoreError: there is none.
    """
    return [_entry(Store.existing(results, run)) for run in existing_runs(results)[:most]]


def _entry(store: Store) -> RunEntry:
    from orchestrator.report.answers import best_text
    from orchestrator.report.run_report import read_status, read_summary

    best, note = "", ""
    try:
        summary, _ = read_summary(store, lean=True)
        for contest in summary.contests[:1]:
            best = best_text(contest, summary.chosen(contest.fastest))
    except StoreError as error:
        note = str(error).splitlines()[0]
    status = None
    with contextlib.suppress(StoreError):
        status = read_status(store)
    if status is None:
        return RunEntry(run=store.run, state="", best=best, note=note)
    return RunEntry(
        run=store.run,
        state=state_of(status),
        done=status.done,
        total=status.total,
        eta_s=None if status.finished else status.eta_s,
        eta_low_s=status.eta_low_s,
        eta_high_s=status.eta_high_s,
        at=status.at,
        note=note or status.stopping or status.waiting or status.paused or status.trouble,
        best=best,
    )


def with_sent(entries: Sequence[RunEntry], jobs: Iterable[JobInfo]) -> list[RunEntry]:
    """The list with the runs of submitted jobs, the newest first, whose drivers have said nothing
    yet; those that ended so, with the command that shows why.

    A run that was sent once more has the state of its driver before until the new one speaks.
    """
    spoken = {each.run: each.at for each in entries if each.state}
    sent: dict[str, RunEntry] = {}
    for job in jobs:
        if not job.run or job.run in sent:
            continue
        if job.run in spoken and (job.over or _began_before(job, spoken[job.run])):
            continue
        note = ""
        if job.over:
            said = (job.message.strip().splitlines() or ["it said nothing"])[-1]
            note = f"{said}; nightgrid logs {job.submission_id} has more"
        state = job.status if job.over else "STARTING"
        sent[job.run] = RunEntry(run=job.run, state=state, at=job.started_at, note=note)
    return [*sent.values(), *(each for each in entries if each.run not in sent)]


def _began_before(job: JobInfo, at: float | None) -> bool:
    """Return whether a job may have been running at a moment."""
    return at is None or (job.started_at is not None and job.started_at <= at)


def entry_lines(entries: Sequence[RunEntry], now: float) -> list[str]:
    """The list as a table; the winner and the reason of each run stand below its line."""
    from orchestrator.watching.live_text import duration, left_text

    rows = [("run", "state", "jobs", "time left", "last heard of")]
    below: list[list[str]] = [[]]
    for each in entries:
        jobs = "" if each.total is None else f"{each.done}/{each.total}"
        left = ""
        if each.eta_s is not None:
            left = left_text(each.eta_s, each.eta_low_s, each.eta_high_s)
        heard = "" if each.at is None else f"{duration(now - each.at)} ago"
        rows.append((each.run, each.state or "?", jobs, left, heard))
        below.append([text for text in (each.best, each.note) if text])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, texts in zip(rows, below, strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines += [line.rstrip(), *(f"    {text}" for text in texts)]
    return lines


def entry_of(values: Mapping[str, Any]) -> RunEntry:
    """The entry that another process has written as JSON."""
    return RunEntry(**{each.name: values[each.name] for each in dataclasses.fields(RunEntry)})
