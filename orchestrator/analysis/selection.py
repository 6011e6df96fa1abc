"""Select the rows that count, and group them into tables.

Of a job's rows (attempts, probes, later invocations) the newest marked ``final`` counts. Rows share
a table if they differ in precision and batch size only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from orchestrator.analysis.flags import Raised, league_of
from orchestrator.core.job import Accelerator, State, supersedes
from orchestrator.core.measurement import Measurement
from orchestrator.core.plan import TOOK
from orchestrator.core.settings import as_declared, usual_engine
from orchestrator.util.format import scalar
from workloads import registry
from workloads.util.contents import FILES

#: Report order; other precisions follow by name.
PRECISION_ORDER = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """A job without precision and batch size, and the device it ran on."""

    workload: str
    model: str
    dataset: str
    accelerator: str
    emulated: bool
    device: str  # device name; "" if nothing ran
    cards: int
    engine: str
    isolation: str
    parameters: tuple[tuple[str, str], ...]  # name, value as text
    league: str = ""  # "" for most; flagged rows of a league rank only among themselves
    _hash: int = field(init=False, repr=False, compare=False)  # every section looks settings up

    def __post_init__(self) -> None:
        values = tuple(getattr(self, name) for name in _COMPARED)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    @property
    def where(self) -> str:
        """The hardware for headings: ``8 × HPU, emulated on AMD EPYC 9B14``."""
        cards = f"{self.cards} × {self.accelerator}"
        if self.emulated:
            return f"{cards}, emulated on {self.device}" if self.device else f"{cards}, emulated"
        return f"{cards}, {self.device}" if self.device else cards

    @property
    def card(self) -> str:
        """Short name of the card for sentences: ``Gaudi2``, ``emulated HPU``."""
        return f"emulated {self.accelerator}" if self.emulated else self.device or self.accelerator


_COMPARED = tuple(field.name for field in fields(Setting) if field.compare)
_FIELDS = tuple(name for name in _COMPARED if name not in ("parameters", "league"))


def newest_final(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return the newest final row of each job, in order of first appearance.

    Rows without times are as new as the rows before them. A success is never replaced by LOST or
    NOT_STARTED, nor a real card's row by an emulated one's.
    """
    newest: dict[str, tuple[float, Measurement]] = {}
    reached = float("-inf")
    for row in measurements:
        known_times = (row.recorded_at, row.ended_at, row.started_at)
        time = next((t for t in known_times if t is not None), reached)
        reached = max(reached, time)
        if not row.final:
            continue
        known = newest.get(row.job_id)
        if known is None or _stands_for(row, known[1], newer=time >= known[0]):
            newest[row.job_id] = (time, row)
    return tuple(row for _, row in newest.values())


def files_of(row: Measurement, kind: str) -> str:
    """Return the identity of the files of a row's ``model`` or ``dataset``; "" if unknown."""
    entries = row.details.get(TOOK, "").split(", ")
    start = f"{kind} {FILES}"
    return next((one.removeprefix(start) for one in entries if one.startswith(start)), "")


def by_content(rows: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return rows whose models and datasets tell by their names which files they were, where the
    files of one name changed between rows."""
    contents: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for kind in ("model", "dataset") if TOOK in row.details else ():
            if files := files_of(row, kind):
                contents.setdefault((kind, getattr(row, kind)), set()).add(files)
    several = {key for key, known in contents.items() if len(known) > 1}
    if not several:
        return tuple(rows)
    result = []
    for row in rows:
        names: dict[str, Any] = {
            kind: f"{name} (files {files[:6]})"
            for kind, name in several
            if getattr(row, kind) == name and (files := files_of(row, kind))
        }
        result.append(replace(row, **names) if names else row)
    return tuple(result)


def _stands_for(row: Measurement, other: Measurement, *, newer: bool) -> bool:
    """Return whether ``row`` represents the job rather than ``other``."""
    if row.emulated != other.emulated:
        real = other if row.emulated else row
        if real.state is State.SUCCEEDED:
            return real is row
    return supersedes(row.state, other.state) if newer else not supersedes(other.state, row.state)


def settings_of(
    rows: Sequence[Measurement], raised: Mapping[str, tuple[Raised, ...]] | None = None
) -> dict[str, Setting]:
    """Return the setting of each row, by job id. A row without a device gets that of the rows on
    the same kind of card, if they share one."""
    homes: dict[Accelerator, set[tuple[bool, str]]] = {}
    for row in rows:
        if row.device_name:
            homes.setdefault(row.accelerator, set()).add((row.emulated, row.device_name))
    settings = {}
    shared: dict[tuple[object, ...], Setting] = {}  # a few thousand serve all rows of a large run
    for row in rows:
        emulated, device = row.emulated, row.device_name or ""
        if not device:
            known = homes.get(row.accelerator, set())
            alike = {home for home in known if home[0] == emulated}
            for candidates in (known, alike):
                if len(candidates) == 1:
                    ((emulated, device),) = candidates
        league = league_of(row, (raised or {}).get(row.job_id, ()))
        fields = (
            *(row.workload, row.model, row.dataset, str(row.accelerator), emulated, device),
            *(row.cards, row.engine, row.isolation),
        )
        key = (*fields, league, id(row.parameters))  # rows outlive this: no other gets its id
        if key not in shared:
            own: dict[str, Any] = dict(zip(_FIELDS, fields, strict=True))
            declared = as_declared(row.workload, row.engine, row.parameters)
            parameters = tuple(sorted((name, scalar(value)) for name, value in declared.items()))
            shared[key] = Setting(**own, parameters=parameters, league=league)
        settings[row.job_id] = shared[key]
    return settings


@lru_cache(maxsize=65_536)
def stated_parameters(setting: Setting) -> dict[str, str]:
    """Return a setting's parameters, name and value, without defaults. Work that every job id has,
    such as ``output_tokens`` and ``method``, is stated whether or not it was set."""
    engine = setting.engine or usual_engine(setting.workload)
    declared = registry.declared_in_rows(setting.workload, engine)
    return {
        name: value
        for name, value in setting.parameters
        if (own := declared.get(name)) is None
        or (own.role == "work" and own.always_in_id)
        or scalar(own.default) != value
    }


def varying_parameters(settings: Iterable[Setting]) -> frozenset[str]:
    """Return the names of parameters whose value differs between settings; a default that some
    settings lack is no difference."""
    values: dict[str, set[str]] = {}
    stating: Counter[str] = Counter()
    count = 0
    for setting in settings:
        count += 1
        stating.update(stated_parameters(setting).keys())
        for name, value in setting.parameters:
            values.setdefault(name, set()).add(value)
    return frozenset(n for n, known in values.items() if len(known) > 1 or 0 < stating[n] < count)


def shared_by_workload(settings: Iterable[Setting]) -> dict[str, dict[str, str]]:
    """Return settings with one value in all rows of a workload, as name and value, by workload."""
    groups: dict[str, list[Setting]] = {}
    for setting in sorted(set(settings)):
        groups.setdefault(setting.workload, []).append(setting)
    shared = {}
    for workload, group in groups.items():
        facts: dict[str, str] = {}
        for name in ("model", "dataset", "engine", "isolation"):
            values = {getattr(setting, name) for setting in group}
            if len(values) == 1:
                facts[name] = values.pop()
        varying = varying_parameters(group)
        for name, value in stated_parameters(group[0]).items():
            if name not in varying:
                facts[name.replace("_", " ")] = value
        if known := {name: value for name, value in facts.items() if value}:
            shared[workload] = known
    return shared


@dataclass(frozen=True, slots=True)
class Differences:
    """Facts in which settings differ, besides model and device; computed once for large grids."""

    fields: tuple[str, ...]  # of ``Setting``
    parameters: frozenset[str]

    @classmethod
    def among(cls, settings: Sequence[Setting]) -> Differences:
        """Return the differences among these settings."""
        names = ("workload", "dataset", "engine", "isolation", "league")
        fields = tuple(n for n in names if len({getattr(one, n) for one in settings}) > 1)
        return cls(fields=fields, parameters=varying_parameters(settings))

    def of(self, setting: Setting) -> dict[str, str]:
        """Return the facts in which a setting differs from the others."""
        facts = {name: getattr(setting, name) for name in self.fields}
        for name, value in setting.parameters:
            if name in self.parameters:
                facts[name.replace("_", " ")] = value
        return {name: value for name, value in facts.items() if value}


def precision_rank(name: str) -> tuple[int, str]:
    """Sort key of precisions, from wide to narrow."""
    known = name in PRECISION_ORDER
    return (PRECISION_ORDER.index(name) if known else len(PRECISION_ORDER), name)


def described(facts: Mapping[str, str]) -> str:
    """Format facts on one line: ``engine transformers · output tokens 128``."""
    return " · ".join(f"{name} {value}" for name, value in facts.items())
