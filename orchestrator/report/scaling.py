"""Scaling over cards: how much of N cards' worth N cards give.

Every card has a batch of its own, so twice the cards do twice the work (weak scaling), and with
perfect scaling in the same time. Efficiency is the throughput of N cards over N/n times that of
the fewest cards n that were measured; what is missing went into communication and waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.report.grouping import Setting, precision_rank
from orchestrator.report.ratio import Ratio, rate_of, ratio_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One number of cards. ``speedup`` is over the base, ``ideal`` what perfect scaling gives."""

    row: Measurement
    speedup: Ratio
    ideal: float

    @property
    def efficiency(self) -> float:
        """Share of perfect scaling, 0 to 1 (above 1 where the base was held back)."""
        return self.speedup.value / self.ideal


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The same job on growing numbers of cards. ``steps`` begin with the base itself."""

    setting: Setting  # cards are the base's
    precision: str
    batch_size: str
    base: Measurement
    steps: tuple[Step, ...]


def scalings_of(
    rows: Sequence[Measurement], settings: Mapping[str, Setting]
) -> tuple[Scaling, ...]:
    """One entry for each job that succeeded on two or more numbers of cards."""
    groups: dict[tuple[Setting, str, str, str], list[Measurement]] = {}
    apart: dict[Setting, Setting] = {}  # from what cards say; a few settings serve all rows
    for row in rows:
        if row.state is State.SUCCEEDED and rate_of(row):
            own = settings[row.job_id]
            if own not in apart:
                apart[own] = replace(own, cards=0)
            setting = apart[own]
            unit = row.metrics.throughput_unit
            key = (setting, row.precision, row.batch_size_requested, unit)
            groups.setdefault(key, []).append(row)
    found = []
    for (setting, precision, batch_size, _), group in groups.items():
        ordered = sorted(group, key=lambda row: row.cards)
        # Batches that were searched for may differ, and then the cards did unlike work.
        ordered = [row for row in ordered if row.batch_size == ordered[0].batch_size]
        if len({row.cards for row in ordered}) < 2:
            continue
        base = ordered[0]
        found.append(
            Scaling(
                setting=replace(setting, cards=base.cards),
                precision=precision,
                batch_size=batch_size,
                base=base,
                steps=tuple(_step(row, base) for row in ordered),
            )
        )
    return tuple(sorted(found, key=lambda s: (s.setting, precision_rank(s.precision))))


def _step(row: Measurement, base: Measurement) -> Step:
    mine, other = rate_of(row), rate_of(base)
    assert mine is not None and other is not None
    speedup = Ratio(value=1.0, low=1.0, high=1.0) if row is base else ratio_of(mine, other)
    return Step(row=row, speedup=speedup, ideal=row.cards / base.cards)
