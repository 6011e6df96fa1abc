"""A job is one fully specified point of a grid; its identity is its content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Literal

from workloads.engines import default_engine, process_kind
from workloads.measure_settings import MeasureSettings

Scalar = str | int | float | bool | None
#: A workload's own settings, sorted by name.
Parameters = tuple[tuple[str, Scalar], ...]

#: ``batch_size: max`` asks for the largest batch that fits.
MAX = "max"


class Accelerator(str, Enum):
    """What a card is, as Ray's resource name. ``device`` is the software handle on it."""

    HPU = "HPU"
    GPU = "GPU"
    CPU = "CPU"

    __str__ = str.__str__
    __hash__ = str.__hash__  # thousands of jobs are counted by it; Enum's own is in Python

    @property
    def device(self) -> str:
        """The torch device type of this kind of card: ``hpu``, ``cuda`` or ``cpu``."""
        return _DEVICES[self]


_DEVICES = {Accelerator.HPU: "hpu", Accelerator.GPU: "cuda", Accelerator.CPU: "cpu"}


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
        """Whether a job in this state is finished with."""
        return self not in (State.PENDING, State.RUNNING)


def supersedes(newer: State, older: State) -> bool:
    """Whether a job's newer final row stands for it: one that measured nothing never hides a
    success, which happens when a run that measures everything anew is cut short."""
    return not (older is State.SUCCEEDED and newer in (State.NOT_STARTED, State.LOST))


_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


@lru_cache(maxsize=4096, typed=True)  # thousands of jobs share their values
def _value_json(value: Scalar) -> str:
    return _canonical_json(value)


#: And their parameters, known by identity, since 1, 1.0 and True are equal and other settings.
#: What is kept here lives, so that no other tuple can have its id.
_known_parameters: dict[int, tuple[Parameters, str]] = {}
_MOST_PARAMETERS = 4096


def _parameters_json(parameters: Parameters) -> str:
    known = _known_parameters.get(id(parameters))
    if known is None:
        if len(_known_parameters) >= _MOST_PARAMETERS:
            _known_parameters.clear()
        known = (parameters, _canonical_json(dict(parameters)))
        _known_parameters[id(parameters)] = known
    return known[1]


class _Identified:
    """A slot for the cached id: not a field, so it is neither compared nor pickled."""

    __slots__ = ("_job_id",)
    _job_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(_Identified):
    """One point of the grid. ``parameters`` are the workload's own, sorted by name."""

    experiment: str
    workload: str
    model: str
    dataset: str
    accelerator: Accelerator
    cards: int
    precision: str
    batch_size: int | Literal["max"]
    engine: str = field(default_factory=default_engine)
    isolation: Literal["warm", "process"] = "warm"
    parameters: Parameters = ()
    measure: MeasureSettings = field(default_factory=MeasureSettings)

    def identity(self) -> dict[str, object]:
        """What the job means. The experiment's name and the stopping rule carry no meaning:
        renaming an experiment or asking for more repeats does not make it another job."""
        return {
            "workload": self.workload,
            "model": self.model,
            "dataset": self.dataset,
            "accelerator": self.accelerator.value,
            "cards": self.cards,
            "precision": self.precision,
            "batch_size": self.batch_size,
            "engine": self.engine,
            "isolation": self.isolation,
            "parameters": dict(self.parameters),
        }

    def _canonical(self) -> str:
        """``identity`` as JSON with sorted keys, put together from what many jobs share."""
        return (
            f'{{"accelerator":{_value_json(self.accelerator.value)}'
            f',"batch_size":{_value_json(self.batch_size)}'
            f',"cards":{_value_json(self.cards)}'
            f',"dataset":{_value_json(self.dataset)}'
            f',"engine":{_value_json(self.engine)}'
            f',"isolation":{_value_json(self.isolation)}'
            f',"model":{_value_json(self.model)}'
            f',"parameters":{_parameters_json(self.parameters)}'
            f',"precision":{_value_json(self.precision)}'
            f',"workload":{_value_json(self.workload)}}}'
        )

    @property
    def job_id(self) -> str:
        """First 16 hex digits of the SHA-256 of the job's canonical JSON."""
        try:
            known: str = self._job_id
        except AttributeError:
            known = hashlib.sha256(self._canonical().encode()).hexdigest()[:16]
            object.__setattr__(self, "_job_id", known)
        return known

    @property
    def process_kind(self) -> str:
        """What a process must be to run this job; "" for an ordinary one."""
        return process_kind(self.engine, self.accelerator.device, dict(self.parameters))

    @property
    def residency_key(self) -> str:
        """Jobs with equal keys can share a loaded model in a warm worker."""
        loading = {"attention", "compile", "adapter", "tensor_parallel", "hpu_mode"}
        loading |= {"packed_weights"}  # a packed model has no plain matrices left
        shared = [self.workload, self.model, self.precision, self.engine]
        shared += [f"{name}={value}" for name, value in self.parameters if name in loading]
        return "|".join(shared)

    @property
    def label(self) -> str:
        """A short name for people: progress lines, the Ray dashboard."""
        cards = f" {self.cards}x{self.accelerator}" if self.cards > 1 else f" {self.accelerator}"
        return f"{self.model} {self.workload} {self.precision} b={self.batch_size}{cards}"
