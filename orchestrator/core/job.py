"""A job is one point of a grid. Its identity is its content: equal settings are the same job.

Ids and residency keys follow the declarations of settings (``workloads/settings.py``). A setting of
a workload or engine that is not installed here enters the id as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import ClassVar, Literal, SupportsIndex

from orchestrator.core.settings import FIELDS, batch_text
from workloads import registry
from workloads.base import BadConfiguration, MeasureSettings
from workloads.devices import DeviceSpec, all_devices, of_accelerator, own_devices
from workloads.engines import default_engine, process_kind, runs_alone

_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

Scalar = str | int | float | bool | None
#: A workload's own settings, sorted by name.
Parameters = tuple[tuple[str, Scalar], ...]

#: ``batch_size: max`` asks for the largest batch that fits, ``best`` for the fastest.
MAX, BEST = "max", "best"


class _Declared(type):
    """Metaclass: ``Accelerator.NAME`` is ``Accelerator("NAME")``; iterating gives all kinds."""

    def __getattr__(cls, name: str) -> Accelerator:
        try:
            return Accelerator(name)
        except ValueError as error:
            raise AttributeError(str(error)) from None

    def __iter__(cls) -> Iterator[Accelerator]:
        return (Accelerator(spec.accelerator) for spec in all_devices())


class Accelerator(str, metaclass=_Declared):
    """Kind of card by its name in grids and rows. One object each, so ``is`` compares kinds; it
    hashes as text, since thousands of jobs are counted by it."""

    __slots__ = ("spec",)
    spec: DeviceSpec

    _known: ClassVar[dict[str, Accelerator]] = {}

    def __new__(cls, name: str) -> Accelerator:
        """Raise ValueError, listing the declared kinds, if no device declares the name."""
        known = cls._known.get(name)
        if known is None:
            try:
                spec = of_accelerator(name)
            except BadConfiguration as error:
                raise ValueError(str(error)) from None
            known = str.__new__(cls, name)
            known.spec = spec
            known = cls._known.setdefault(name, known)
        return known

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type, tuple[str]]:
        return Accelerator, (self.value,)

    @property
    def value(self) -> str:
        """The name as plain text."""
        return str(self)

    @property
    def device(self) -> str:
        """Name of the device (software) that drives such a card."""
        return self.spec.name


def default_accelerator() -> Accelerator:
    """The kind of card of a grid that names none."""
    return Accelerator(own_devices()[0].accelerator)


class State(str, Enum):
    """Every job of a grid ends in exactly one terminal state, as a row, with a reason."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNSUPPORTED = "UNSUPPORTED"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED_OUT"
    LOST = "LOST"
    NOT_STARTED = "NOT_STARTED"

    __str__ = str.__str__

    @property
    def terminal(self) -> bool:
        """Return whether a job in this state is finished with."""
        return self not in (State.PENDING, State.RUNNING)


#: States without an answer through no fault of the job.
UNANSWERED = (State.LOST, State.NOT_STARTED)


def supersedes(newer: State, older: State) -> bool:
    """Return whether a newer final row replaces the older: a failure is an answer of today's
    software, LOST and NOT_STARTED are none and hide no success."""
    return not (older is State.SUCCEEDED and newer in UNANSWERED)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One point of the grid. ``parameters`` are the workload's own, sorted by name."""

    experiment: str
    workload: str
    model: str
    dataset: str
    accelerator: Accelerator
    cards: int
    precision: str
    batch_size: int | str  # a number, or the text of a search (``settings.py``)
    engine: str = field(default_factory=default_engine)
    isolation: Literal["warm", "process"] = "warm"
    parameters: Parameters = ()
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    #: Number of this repetition in a fresh process, from 1 (``scheduler/queues.py``).
    replicate: int = 1

    def identity(self) -> dict[str, object]:
        """Content that the id is made of.

        The experiment's name and the stopping rule are left out, so changing them keeps the id; a
        replicate's number is in it from 2 on, so replicate 1 has the id of a job without any.
        """
        content: dict[str, object] = {
            name: declared.value_in_id(value)
            for name, declared in FIELDS.items()
            if declared.enters_id(value := getattr(self, name))
        }
        entry = registry.WORKLOADS.get(self.workload)
        declarations = registry.declared_in_rows(self.workload, self.engine)
        parameters: dict[str, Scalar] = dict(entry.moved) if entry is not None else {}
        for name, value in self.parameters:
            declaration = declarations.get(name)
            if declaration is None:
                parameters[name] = value
            elif declaration.enters_id(value):
                parameters[name] = declaration.value_in_id(value)
        content["parameters"] = parameters
        if self.replicate > 1:
            content["replicate"] = self.replicate
        return content

    @cached_property
    def job_id(self) -> str:
        """First 16 hex digits of the SHA-256 of the job's canonical JSON."""
        return hashlib.sha256(_canonical_json(self.identity()).encode()).hexdigest()[:16]

    @cached_property
    def cell_id(self) -> str:
        """Id of the first replicate, shared by all."""
        return self.job_id if self.replicate == 1 else replace(self, replicate=1).job_id

    @property
    def process_kind(self) -> str:
        """Kind of process that can run this job; "" for an ordinary one."""
        return process_kind(
            self.engine,
            self.accelerator.device,
            dict(self.parameters),
            workload=self.workload,
            precision=self.precision,
        )

    @property
    def alone(self) -> bool:
        """Return whether its processes run no other job."""
        if self.cards > 1 or self.isolation == "process":
            return True
        entry = registry.WORKLOADS.get(self.workload)
        return runs_alone(self.engine, entry.ability if entry is not None else None)

    @cached_property
    def residency_key(self) -> str:
        """Key of jobs that can share a loaded model in a warm worker: the settings that change the
        model, or all settings of an unknown workload."""
        key = "|".join(str(getattr(self, name)) for name, field in FIELDS.items() if field.loads)
        declared = registry.declared_in_rows(self.workload, self.engine)
        for name, value in self.parameters:
            if name not in declared or declared[name].loads:
                key += f"|{name}={value}"
        return key

    @property
    def label(self) -> str:
        """Short name for progress lines and the Ray dashboard."""
        cards = f" {self.cards}x{self.accelerator}" if self.cards > 1 else f" {self.accelerator}"
        again = f" replicate {self.replicate}" if self.replicate > 1 else ""
        batch = f" {batch_text(self.workload, self.batch_size)}".rstrip()
        return f"{self.model} {self.workload} {self.precision}{batch}{cards}{again}"
