"""Provenance of the rows: the software that produced them, and what is not real about them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.analysis.replicates import Drift
from orchestrator.core.card_check import SlowCard
from orchestrator.core.job import State
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import LOST
from orchestrator.core.settings import undeclared
from workloads.base import LEFT_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """Something the reader must know before believing a number."""

    name: str  # "Emulated cards", "Random weights", …
    count: int
    of: int  # rows it could apply to
    meaning: str
    details: tuple[str, ...] = ()  # names of what is affected


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact of provenance: its values and their row counts, commonest first."""

    name: str
    values: tuple[tuple[str, int], ...]

    @property
    def mixed(self) -> bool:
        """Return whether the rows disagree."""
        return len(self.values) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One ``nightgrid run`` that left rows; times in seconds since the epoch."""

    invocation_id: str
    started_at: float | None
    ended_at: float | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Provenance of a run's rows."""

    facts: tuple[Fact, ...] = ()  # code, host
    versions: tuple[Fact, ...] = ()  # of software
    invocations: tuple[Invocation, ...] = ()

    @property
    def mixed(self) -> tuple[Fact, ...]:
        """Facts of software and commit on which rows disagree, which limits comparison."""
        comparable = {"git commit", "working tree", "driver"}
        return tuple(
            fact
            for fact in (*self.versions, *(f for f in self.facts if f.name in comparable))
            if fact.mixed
        )


#: Seconds by which a card's check may be dated later than the first row after it.
_DATED_S = 1.0

_MEANINGS = {
    "Emulated cards": "These rows ran on a CPU that stands in for the accelerator. They show that "
    "the grid works, not how fast the accelerator is.",
    "Random weights": "The model was never trained. Its speed and memory are those of its shape; "
    "its outputs mean nothing.",
    "Synthetic data": "The inputs were generated. Their lengths follow the real dataset's; their "
    "content does not.",
    "Records left out": "Not all records of these datasets could be used, or some were changed; "
    "the rows' details count them.",
    "Lost cards": "These cards could not be used: the driver or the vendor's tool says so. The run "
    "went on with the others.",
    "Unknown settings": "No workload that is installed here has these settings. Rows that differ "
    "in them are taken for unlike work: they are never ranked against each other.",
    "Slow cards": "These cards were slower than their neighbours, or than in earlier runs, before "
    "their first job.",
    "Far below published figures": "Others have measured more than twice as much on the same card, "
    "with the same model, precision, batch and lengths. Look at engine, mode and software.",
    "Drift over the night": "Replicates of the same cells were not equally fast early and late. "
    "Their order is drawn, so no cell is favoured, and the intervals hold the drift.",
}


def banners_of(
    rows: Sequence[Measurement],
    slow_cards: Sequence[SlowCard] = (),
    far_below: Mapping[str, str] | None = None,
    drift: Drift | None = None,
) -> tuple[Banner, ...]:
    """Return the banners that apply, most serious first. Cards that are still slow are shown even
    if no row used them. ``far_below`` has sentences by job id."""
    measured, every = [row for row in rows if row.state is State.SUCCEEDED], len(rows)
    emulated = [row for row in rows if row.emulated]
    devices = _names(f"{r.accelerator} on {r.device_name}" for r in emulated if r.device_name)
    models = [row.model for row in measured if row.random_weights]
    datasets = [row.dataset for row in measured if row.synthetic_data]
    partial = [row for row in measured if LEFT_OUT & row.details.keys()]
    lost = [f"{', '.join(row.nodes)}: {row.details[LOST]}" for row in rows if LOST in row.details]
    unknown = ((row, undeclared(row.workload, row.engine, row.parameters)) for row in rows)
    foreign = [(row, names) for row, names in unknown if names]
    settings = _names(f"{row.workload}: {name}" for row, names in foreign for name in names)
    banners: list[tuple[str, int, int, tuple[str, ...]]] = [
        ("Emulated cards", len(emulated), every, devices or ("no row reached a device",)),
        ("Random weights", len(models), len(measured), _names(models)),
        ("Synthetic data", len(datasets), len(measured), _names(datasets)),
        ("Records left out", len(partial), len(measured), _names(r.dataset for r in partial)),
        ("Lost cards", len(lost), every, _names(lost)),
        ("Unknown settings", len(foreign), every, settings),
    ]
    banners = [banner for banner in banners if banner[1]]
    on_slow = [[one for one in slow_cards if _ran_on(one, row)] for row in rows]
    worst: dict[str, str] = {}  # of a card that was slow in several checks
    for one in slow_cards:
        if one.until == math.inf or any(one in found for found in on_slow):
            worst.setdefault(one.card, str(one))
    if worst:
        count = sum(map(bool, on_slow))
        banners.append(("Slow cards", count, every, tuple(worst.values())))
    if far_below:
        sentences = tuple(dict.fromkeys(far_below.values()))
        banners.append(("Far below published figures", len(far_below), every, sentences))
    if drift is not None:
        text = f"{drift.change:+.1%} from first to last, over {drift.hours:.1f} h"
        banners.append(("Drift over the night", drift.rows, drift.rows, (text,)))
    return tuple(
        Banner(name=name, count=count, of=of, meaning=_MEANINGS[name], details=details)
        for name, count, of, details in banners
    )


def _ran_on(slow: SlowCard, row: Measurement) -> bool:
    """Tell if a row was measured on a slow card, after the check that was slow and before the
    next."""
    # A check is dated when the row of its job is recorded, or a moment later.
    at = (row.recorded_at or 0.0) + _DATED_S
    cards = (f"{n}/{row.accelerator}{i}" for n in row.nodes for i in row.card_indices)
    return slow.since <= at < slow.until and slow.card in cards


def provenance_of(rows: Sequence[Measurement], measurements: Sequence[Measurement]) -> Provenance:
    """Return the provenance of the newest final ``rows``; ``measurements`` are all rows."""
    first = ("nightgrid", "python", "torch", "transformers", "peft", "ray", "habana", "cuda")
    names = sorted({name for row in rows for name in row.versions} - set(first))
    names = [*first, *names]
    versions = [
        _fact(name, (r.versions[name] for r in rows if name in r.versions)) for name in names
    ]
    trees = {None: None, True: "with uncommitted changes", False: "clean"}
    facts = [
        _fact("git commit", (r.git_commit for r in rows)),
        _fact("working tree", (trees[r.git_dirty] for r in rows)),
        _fact("node", (node for r in rows for node in dict.fromkeys(r.nodes))),
        _fact("device", (r.device_name for r in rows)),
        _fact("driver", (r.driver_version for r in rows)),
        _fact("threads per worker", (r.threads for r in rows)),
        _fact("niceness", (r.niceness for r in rows)),
        _fact("schema version", (r.schema_version for r in rows)),
    ]
    groups: dict[str, list[Measurement]] = {}
    for row in measurements:
        groups.setdefault(row.invocation_id, []).append(row)
    invocations = (
        Invocation(
            invocation_id=name,
            started_at=min((r.started_at for r in group if r.started_at is not None), default=None),
            ended_at=max((r.ended_at for r in group if r.ended_at is not None), default=None),
            rows=len(group),
        )
        for name, group in groups.items()
    )
    return Provenance(
        facts=tuple(fact for fact in facts if fact.values),
        versions=tuple(fact for fact in versions if fact.values),
        invocations=tuple(invocations),
    )


def _fact(name: str, values: Iterable[object]) -> Fact:
    counted = Counter(str(value) for value in values if value is not None and value != "")
    return Fact(name=name, values=tuple(counted.most_common()))


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in Counter(names).most_common())
