"""Jobs that may not start before others have succeeded.

A job is held back until all that it needs have succeeded, in this run or an earlier one. When one
of them ends otherwise, or never will run, the job ends too, with that as its reason, and with it
what needs it in turn. What a job only comes after (``PlannedJob.after``) may end as it likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from orchestrator.core.job import State
from orchestrator.core.plan import Action, PlannedJob
from orchestrator.scheduling.record import JobRecord, Phase


def needed(jobs: Iterable[PlannedJob]) -> frozenset[str]:
    """Ids of jobs that others wait for. They go first: until they have ended, the schedule has
    less to choose from, and a gang that is held back by a short job would come last."""
    return frozenset(
        each
        for planned in jobs
        if planned.action is Action.RUN
        for each in (*planned.needs, *planned.after)
    )


class Needs:
    """Knows who is held back by whom. Jobs outside of any need cost nothing."""

    def __init__(self, jobs: Sequence[PlannedJob], records: Iterable[JobRecord]) -> None:
        by_id = {record.job_id: record for record in records}
        self._missing: dict[str, set[str]] = {}  # held job -> what it still needs
        self._waiting_for: dict[str, list[JobRecord]] = {}  # needed job -> held ones
        #: Jobs that can never start, and why; known before anything has run.
        self.hopeless: list[tuple[JobRecord, str]] = []
        self._only_after: set[tuple[str, str]] = set()  # held job, job that it comes after
        if not any(planned.needs or planned.after for planned in jobs):
            return
        planned_by_id: dict[str, PlannedJob] = {}
        for planned in jobs:
            planned_by_id.setdefault(planned.job.job_id, planned)
        for job_id, planned in planned_by_id.items():
            record = by_id.get(job_id)
            wanted = [] if record is None else list(dict.fromkeys(planned.needs))
            others = {each: planned_by_id.get(each) for each in wanted}
            missing = {e for e, o in others.items() if o is None or o.action is not Action.REUSE}
            after = {e for e in planned.after if e in by_id and e not in others}
            if record is None or not (missing or after):
                continue
            self._only_after |= {(job_id, each) for each in after}
            wanted += sorted(after)
            missing |= after
            record.phase = Phase.HELD
            self._missing[job_id] = missing
            for each in wanted:
                if each in by_id and each in missing:
                    self._waiting_for.setdefault(each, []).append(record)
            never = [each for each in wanted if each in missing and each not in by_id]
            if never:
                self.hopeless.append((record, _why(never[0], others[never[0]])))
        self._find_circles(by_id)

    def ended(self, record: JobRecord, reason: str) -> list[tuple[JobRecord, str]]:
        """A job has its final row: those that need it, each with why it can never start, or with
        nothing when it may start now."""
        found = []
        for held in self._waiting_for.pop(record.job_id, ()):
            missing = self._missing[held.job_id]
            missing.discard(record.job_id)
            comes_after = (held.job_id, record.job_id) in self._only_after
            if record.state is not State.SUCCEEDED and not comes_after:
                about = f": {reason}" if reason else ""
                why = f"needs job {record.job_id}, which ended as {record.state}{about}"
                found.append((held, why))
            elif not missing:
                found.append((held, ""))
        return [(held, why) for held, why in found if held.phase is Phase.HELD]

    def _find_circles(self, by_id: dict[str, JobRecord]) -> None:
        """Jobs that wait for each other would wait for ever."""
        left = {job_id: set(missing) & by_id.keys() for job_id, missing in self._missing.items()}
        free = deque(job_id for job_id in by_id if not left.get(job_id))
        while free:
            job_id = free.popleft()
            for held in self._waiting_for.get(job_id, ()):
                left[held.job_id].discard(job_id)
                if not left[held.job_id]:
                    free.append(held.job_id)
        known = {record.job_id for record, _ in self.hopeless}
        for job_id, missing in left.items():
            if missing and job_id not in known:
                why = f"needs job {min(missing)}, and jobs that need each other can never start"
                self.hopeless.append((by_id[job_id], why))


def _why(job_id: str, planned: PlannedJob | None) -> str:
    if planned is None:
        return f"needs job {job_id}, which is not part of this run"
    if planned.action is Action.SKIP:
        return f"needs job {job_id}, which is not run: {planned.reason}"
    return f"needs job {job_id}, which is {planned.action}: {planned.reason}"
