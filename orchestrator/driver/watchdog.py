"""Hung workers: the schedule is told of what has been in one phase for too long, and stops it.

A call into a driver or a collective can hang for ever, holding the interpreter, so that nothing in
the worker could notice. Every phase has a generous limit of its own: imports and loading depend
on file systems, compilation on the model, the timed part on what the grid asked for. A job that is
queued for processors waits for others, and has no limit. Time counts
from when *this* host first saw the phase, by a clock that never jumps: clocks of other hosts may be
wrong, and this one's may be set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from orchestrator.core.events import Command, RunAttempt, WorkerOverdue
from orchestrator.runtime.status import CardStatus

#: Seconds that a worker may stay in a phase. ``starting`` is the process itself: its imports and
#: the acquisition of its card, while all the others of the node do the same.
LIMITS: Mapping[str, float] = {
    "starting": 900.0,
    "start": 600.0,
    "load": 3600.0,
    "compile": 7200.0,
    "warmup": 1800.0,
    "measure": 1800.0,
    "finish": 600.0,
}
#: Warm-up and timed part are cut short after the limits that their job asks for, but a batch that
#: has begun is always finished: a compilation, say.
MEASURE_FACTOR = 3.0
#: The driver looks every second. Of a longer pause between two looks so much counts.
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """A worker's activity at the last look, and its start."""

    attempt_id: str
    phase: str
    since: float


@dataclass(slots=True)
class Watchdog:
    """Looks at the cards now and then; ``overdue`` names each hung worker once."""

    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)
    longest_pause_s: float = LONGEST_PAUSE_S
    #: Worker -> limits that its job asks for, by phase.
    _asked_s: dict[str, dict[str, float]] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _looked_at: float | None = None

    def did(self, command: Command) -> None:
        """Take note of what a worker was given to do."""
        if isinstance(command, RunAttempt):
            for worker_id in command.worker_ids:
                measure = command.attempt.job.measure
                warmup_s = measure.warmup_limit_s if measure.warmup else 0.0
                # Until the end of warm-up, what was timed may prove to be warm-up.
                measure_s = warmup_s + MEASURE_FACTOR * measure.time_limit_s
                self._asked_s[worker_id] = {"warmup": warmup_s, "measure": measure_s}

    def overdue(self, cards: Iterable[CardStatus], now: float) -> list[WorkerOverdue]:
        """The workers that have been in their phase for longer than its limit."""
        self._pass_over_pause(now)
        found = []
        present = [card for card in cards if card.worker_id]
        for card in present:
            seen = self._seen.get(card.worker_id)
            if seen is None or (seen.attempt_id, seen.phase) != (card.attempt_id, card.phase):
                seen = _Seen(card.attempt_id, card.phase, now)
                self._seen[card.worker_id] = seen
            limit = self._limit(card)
            if limit is None or now - seen.since <= limit or card.worker_id in self._told:
                continue
            self._told.add(card.worker_id)
            what = "did not come up" if card.phase == "starting" else f"hung in {card.phase}"
            reason = f"{what}: no progress for {now - seen.since:.0f} s, the limit is {limit:.0f} s"
            found.append(WorkerOverdue(at=now, worker_id=card.worker_id, reason=reason))
        self._forget_all_but({card.worker_id for card in present})
        return found

    def _pass_over_pause(self, now: float) -> None:
        """Leave out time without a look, since this process was halted or waited for a
        disk: what workers have told meanwhile is heard only after the first look."""
        left_out = 0.0
        if self._looked_at is not None:
            left_out = max(0.0, now - self._looked_at - self.longest_pause_s)
        self._looked_at = now
        if left_out:
            for worker_id, seen in self._seen.items():
                self._seen[worker_id] = replace(seen, since=seen.since + left_out)

    def _limit(self, card: CardStatus) -> float | None:
        limit = self.limits.get(card.phase)  # None: idle or free
        if limit is None:
            return None
        return limit + self._asked_s.get(card.worker_id, {}).get(card.phase, 0.0)

    def _forget_all_but(self, worker_ids: set[str]) -> None:
        for kept in (self._asked_s, self._seen):
            for worker_id in kept.keys() - worker_ids:
                del kept[worker_id]
        self._told &= worker_ids
