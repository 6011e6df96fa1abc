"""Watches for hung workers: the schedule stops what has been in one phase for too long.

A call into a card's driver or a collective can hang for ever while holding the interpreter, so the
worker itself cannot notice. Every phase has a generous limit, except being queued for processors.
Time counts on this host's monotonic clock from when it first saw the phase, since clocks may be
wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.core.events import Command, RunAttempt, WorkerOverdue
from orchestrator.core.status import CardStatus

#: Limits in seconds by phase; ``starting`` is imports and acquisition of the card.
LIMITS: Mapping[str, float] = {
    "starting": 900.0,
    "start": 600.0,
    "load": 3600.0,
    "compile": 7200.0,
    "warmup": 1800.0,
    "measure": 1800.0,
    "finish": 600.0,
}
#: Allowance over a job's own limits, since a batch that has begun is finished (it may compile).
MEASURE_FACTOR = 3.0
#: Most that a pause between two checks counts (normally a second).
LONGEST_PAUSE_S = 5.0


@dataclass(slots=True)
class Watchdog:
    """Detects hung workers; ``overdue`` returns each once."""

    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS)
    longest_pause_s: float = LONGEST_PAUSE_S
    #: Worker -> time that its job may take beyond the limits, by phase.
    _allowances_s: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Worker -> its attempt and phase at the last look, and since when these are seen.
    _activities: dict[str, tuple[tuple[str, str], float]] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)
    _looked_at: float | None = None

    def did(self, command: Command) -> None:
        """Set the allowances of a worker's job."""
        if isinstance(command, RunAttempt):
            measure = command.attempt.job.measure
            warmup_s = measure.warmup_limit_s if measure.warmup else 0.0
            # Until the end of warm-up, what was timed may prove to be warm-up.
            measure_s = warmup_s + MEASURE_FACTOR * measure.time_limit_s
            for worker_id in command.worker_ids:
                self._allowances_s[worker_id] = {"warmup": warmup_s, "measure": measure_s}

    def overdue(self, cards: Iterable[CardStatus], now: float) -> list[WorkerOverdue]:
        """The workers that have been in their phase for longer than its limit."""
        self._pass_over_pause(now)
        events = []
        present = [card for card in cards if card.worker_id]
        for card in present:
            activity = (card.attempt_id, card.phase)
            known, since = self._activities.get(card.worker_id, (None, now))
            if known != activity:
                since = now
                self._activities[card.worker_id] = (activity, since)
            limit_s, age_s = self.limits.get(card.phase), now - since  # None: idle or free
            if limit_s is None or card.worker_id in self._reported:
                continue
            limit_s += self._allowances_s.get(card.worker_id, {}).get(card.phase, 0.0)
            if age_s <= limit_s:
                continue
            self._reported.add(card.worker_id)
            what = "did not come up" if card.phase == "starting" else f"hung in {card.phase}"
            reason = f"{what}: no progress for {age_s:.0f} s, the limit is {limit_s:.0f} s"
            events.append(WorkerOverdue(at=now, worker_id=card.worker_id, reason=reason))
        worker_ids = {card.worker_id for card in present}
        for known_workers in (self._allowances_s, self._activities):
            for worker_id in known_workers.keys() - worker_ids:
                del known_workers[worker_id]
        self._reported &= worker_ids
        return events

    def _pass_over_pause(self, now: float) -> None:
        """Ignore time without a check (process halted, slow disk): reports are read after it."""
        left_out_s = 0.0
        if self._looked_at is not None:
            left_out_s = max(0.0, now - self._looked_at - self.longest_pause_s)
        self._looked_at = now
        for worker_id, (activity, since) in self._activities.items():
            self._activities[worker_id] = (activity, since + left_out_s)
