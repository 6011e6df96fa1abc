"""Timeline of the cards: all attempts, and idle time within each invocation.

Cards that never had a job leave no row and are missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """One attempt on one card; times in seconds since the epoch."""

    start: float
    end: float
    attempt_id: str
    row: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One card; ``assigned_s + unassigned_s`` is the length of all windows."""

    node: str
    card: int
    accelerator: str
    spans: tuple[Span, ...]
    assigned_s: float  # to attempts, whatever the card did meanwhile
    unassigned_s: float

    @property
    def name(self) -> str:
        """Name, such as ``node/HPU3``."""
        return f"{self.node}/{self.accelerator}{self.card}"

    @property
    def assigned(self) -> float:
        """Share of the windows assigned to attempts, 0 to 1; utilization may be lower."""
        whole = self.assigned_s + self.unassigned_s
        return self.assigned_s / whole if whole else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All cards, and the time windows of the run, in order."""

    windows: tuple[tuple[float, float], ...] = ()
    lanes: tuple[Lane, ...] = ()

    @property
    def wall_s(self) -> float:
        """Total length of all windows."""
        return sum(end - start for start, end in self.windows)

    @property
    def assigned(self) -> float:
        """Share of all cards' time assigned to attempts, 0 to 1."""
        assigned = sum(lane.assigned_s for lane in self.lanes)
        whole = self.wall_s * len(self.lanes)
        return assigned / whole if whole else 0.0

    def blamed(self) -> list[tuple[Lane, tuple[Span, ...]]]:
        """Cards with the failed attempts of jobs that succeeded on other cards; most first."""
        worked: dict[str, set[str]] = {}  # job -> names of cards
        for lane in self.lanes:
            for span in lane.spans:
                if span.row.state is State.SUCCEEDED:
                    worked.setdefault(span.row.job_id, set()).add(lane.name)
        blamed = []
        for lane in self.lanes:
            failed = tuple(
                span
                for span in lane.spans
                if span.row.state in (State.FAILED, State.TIMED_OUT)
                and (cards := worked.get(span.row.job_id))
                and lane.name not in cards
            )
            if failed:
                blamed.append((lane, failed))
        return sorted(blamed, key=lambda pair: -len(pair[1]))


def timeline_of(measurements: Sequence[Measurement]) -> Timeline:
    """Return the timeline of every attempt that held a card and has both times."""
    windows: dict[str, tuple[float, float]] = {}
    spans: dict[tuple[str, int, str], list[Span]] = {}
    for row in measurements:
        if row.started_at is None or row.ended_at is None or row.ended_at < row.started_at:
            continue
        cards = cards_of(row)
        if not cards:
            continue
        low, high = windows.get(row.invocation_id, (row.started_at, row.ended_at))
        windows[row.invocation_id] = (min(low, row.started_at), max(high, row.ended_at))
        span = Span(start=row.started_at, end=row.ended_at, attempt_id=row.attempt_id, row=row)
        for node, card in cards:
            spans.setdefault((node, card, str(row.accelerator)), []).append(span)
    merged = tuple(union(windows.values()))
    wall = sum(end - start for start, end in merged)
    lanes = []
    for (node, card, accelerator), group in sorted(spans.items(), key=lambda kv: natural(kv[0])):
        assigned = sum(end - start for start, end in union((s.start, s.end) for s in group))
        lanes.append(
            Lane(
                node=node,
                card=card,
                accelerator=accelerator,
                spans=tuple(sorted(group, key=lambda s: (s.start, s.end, s.attempt_id))),
                assigned_s=assigned,
                unassigned_s=max(0.0, wall - assigned),
            )
        )
    return Timeline(windows=merged, lanes=tuple(lanes))


def duration_s(row: Measurement) -> float | None:
    """Return the seconds that an attempt took, by wall clock; None if unknown."""
    if row.started_at is None or row.ended_at is None:
        return None
    return row.ended_at - row.started_at


def cards_of(row: Measurement) -> list[tuple[str, int]]:
    """Return node and index of each card of a row; a gang over several nodes holds equal shares."""
    if not row.nodes:
        return []
    share, last = max(1, len(row.card_indices) // len(row.nodes)), len(row.nodes) - 1
    nodes = (row.nodes[min(place // share, last)] for place in range(len(row.card_indices)))
    return list(dict.fromkeys(zip(nodes, row.card_indices, strict=True)))


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge intervals that overlap or touch, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def natural(key: tuple[str, int, str]) -> tuple[list[tuple[int, int, str]], int, str]:
    """Sort key that puts ``node-10`` after ``node-9``."""
    pieces = [piece for piece in re.split(r"(\d+)", key[0]) if piece]
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in pieces], key[1], key[2]
