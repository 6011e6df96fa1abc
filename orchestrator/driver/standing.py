"""Standing of a run while it goes on: flags of its rows, the best so far, and what is provisional.

Rows are judged as they are made, so that the schedule can repeat disturbed ones
(``scheduler/repeats.py``). Each piece of work has its rows by throughput; flagged rows compete by
the upper end of their interval, since what disturbs a row slows it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from orchestrator.analysis.flags import LASTING, every_flag, raised_on
from orchestrator.analysis.rankings import interval, work_of
from orchestrator.analysis.selection import newest_final, settings_of
from orchestrator.core.events import RecordRow
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.status import BestSoFar
from orchestrator.util.format import plural

#: Pieces of work whose best row is shown.
MOST_WORKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    job_id: str
    work: object  # rows with the same one compete
    value: float
    low: float
    high: float
    unit: str
    emulated: bool
    flags: frozenset[str]


@dataclass(slots=True)
class Standing:
    """The newest final success of each job of a run; a ``FlagJudge`` of the schedule."""

    make: Callable[[RecordRow], Measurement]
    repeats: int = 0  # rows of repeats
    _made: dict[str, Measurement] = field(default_factory=dict)  # judged and not yet written
    _entries: dict[str, _Entry] = field(default_factory=dict)  # by job id
    _works: defaultdict[object, dict[str, _Entry]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    _flags: Counter[str] = field(default_factory=Counter)
    to_repeat: int = 0  # rows that were flagged, those that a repeat replaced included

    def row_of(self, record: RecordRow) -> Measurement:
        """The row of a command, made once although it is judged before it is written."""
        self.repeats += bool(record.repeat)
        known = self._made.pop(record.attempt.attempt_id, None) if record.attempt else None
        if known is None:
            return self.make(record)
        return replace(known, final=record.final, reason=record.reason)

    def measurement(self, record: RecordRow) -> Measurement:
        """The row of a command that is yet to be written."""
        known = self._made.get(record.attempt.attempt_id) if record.attempt is not None else None
        return known or self.make(record)

    def load(self, rows: Sequence[Measurement]) -> None:
        """Take in the rows of earlier drivers."""
        finals = [row for row in newest_final(rows) if row.state is State.SUCCEEDED]
        for row, raised in zip(finals, raised_on(finals), strict=True):
            self._enter(_entry(row, frozenset(one.flag.name for one in raised)))

    def flags(self, row: RecordRow) -> str:
        """Enter a successful final row; names its flags if a repeat may clear them all. Rows of
        emulated cards are not worth one: their figures are of no card."""
        entry = self._judged(row)
        self._enter(entry)
        flags = "" if entry.emulated else _names(entry.flags)
        self.to_repeat += bool(flags and not row.repeat and row.job.measure.repeat_flagged)
        return flags

    def replaces(self, row: RecordRow) -> bool:
        """Return whether a repeat has no flags, or is a nearer lower bound."""
        entry, known = self._judged(row), self._entries.get(row.job.job_id)
        if known is None or not entry.flags:
            return True
        # A lower bound that is higher is nearer to the truth.
        bounds = any(flag.bounds for flag in every_flag() if flag.name in entry.flags)
        return bounds and entry.flags <= known.flags and entry.value > known.value

    def in_order(self, job_ids: Collection[str]) -> list[str]:
        """Sort flagged jobs by how far they reach above the best row of their work."""
        known = [self._entries[job_id] for job_id in job_ids if job_id in self._entries]
        best = {work: _best(self._works[work].values()) for work in {one.work for one in known}}

        def reach(job_id: str) -> float:
            entry = self._entries.get(job_id)
            first = best[entry.work] if entry is not None else None
            return entry.high / (first.low or 1.0) if entry is not None and first else 0.0

        return sorted(job_ids, key=lambda job_id: (-reach(job_id), job_id))

    def flagged(self, *, emulated: bool) -> list[str]:
        """Ids of the jobs whose row has flags that a repeat may clear, with or without those of
        emulated cards."""
        return [
            job_id
            for job_id, entry in self._entries.items()
            if _names(entry.flags) and (emulated or not entry.emulated)
        ]

    def flagged_as(self, job_id: str) -> str:
        """Names of all flags of a job's row; "" if it has none, or there is no row."""
        entry = self._entries.get(job_id)
        return ", ".join(sorted(entry.flags)) if entry is not None else ""

    def flag_counts(self) -> Mapping[str, int]:
        """Count the rows that stand by flag."""
        return {name: count for name, count in sorted(self._flags.items()) if count}

    def best(self, labels: Mapping[str, object]) -> tuple[BestSoFar, ...]:
        """The best row so far of each piece of work with at least two rows, of the first works."""
        bests = []
        competing = (entries.values() for entries in self._works.values() if len(entries) > 1)
        for entries in islice(competing, MOST_WORKS):
            best = _best(entries)
            assert best is not None
            above = sum(bool(one.flags) and one.high >= best.low for one in entries)
            provisional = f"{plural(above, 'flagged row')} may be faster" if above else ""
            if best.flags:
                provisional = f"every row is flagged, this one {', '.join(sorted(best.flags))}"
            bests.append(
                BestSoFar(
                    job=str(labels.get(best.job_id, best.job_id)),
                    per_s=best.value,
                    unit=best.unit,
                    rows=len(entries),
                    provisional=provisional,
                )
            )
        return tuple(bests)

    def _judged(self, record: RecordRow) -> _Entry:
        key = record.attempt.attempt_id if record.attempt is not None else ""
        if key not in self._made:
            self._made[key] = self.make(record)
        row = self._made[key]
        return _entry(row, frozenset(one.flag.name for one in raised_on([row])[0]))

    def _enter(self, entry: _Entry) -> None:
        known = self._entries.get(entry.job_id)
        if known is not None:
            self._flags.subtract(known.flags)
            self._works[known.work].pop(entry.job_id, None)
        self._flags.update(entry.flags)
        self._entries[entry.job_id] = entry
        if entry.value and not entry.flags & LASTING:
            self._works[entry.work][entry.job_id] = entry


def _entry(row: Measurement, flags: frozenset[str]) -> _Entry:
    low, high = interval(row)
    return _Entry(
        job_id=row.job_id,
        work=(work_of(settings_of([row])[row.job_id]), row.metrics.throughput_unit),
        value=row.metrics.throughput or 0.0,
        low=low,
        high=high,
        unit=row.metrics.throughput_unit,
        emulated=row.emulated,
        flags=flags,
    )


def _best(entries: Iterable[_Entry]) -> _Entry | None:
    """The fastest row without flags, else the fastest."""
    return max(entries, key=lambda entry: (not entry.flags, entry.value), default=None)


def _names(flags: frozenset[str]) -> str:
    """Flags that a repeat may clear; "" if there are none, or others as well."""
    return "" if flags & LASTING else ", ".join(sorted(flags))
