"""Memoised rules: one call of a workload's rule for all jobs that look alike to it.

A rule is a function of what it reads of a job (``workloads/base.py``). So it is noted what each
has ever read, and jobs that have all of that in common get one answer: of ten thousand jobs a rule
may see three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, SupportsIndex, TypeVar

from orchestrator.core.job import Job, Parameters
from workloads.base import JobDescription

Answer = TypeVar("Answer")
Rule = Callable[[JobDescription], Sequence[Answer]]

_OF_A_JOB = frozenset(field.name for field in fields(JobDescription)) - {"device", "parameters"}


class Rules(Generic[Answer]):
    """Asks the rules of workloads; ``rule_of`` finds that of a name, if there is one."""

    def __init__(self, rule_of: Callable[[str], Rule[Answer] | None]) -> None:
        self._rule_of = rule_of
        self._answers: dict[tuple[str, str], _Answers[Answer] | None] = {}

    def answers(self, job: Job, device: str) -> tuple[Answer, ...]:
        """Answers of the rule of the job's workload on a device."""
        key = (job.workload, device)
        if key not in self._answers:
            rule = self._rule_of(job.workload)
            self._answers[key] = None if rule is None else _Answers(rule, device)
        answers = self._answers[key]
        return () if answers is None else answers.about(job)


class _Read:
    """Inputs that a rule has read: fields of a job, parameters, or all parameters there are."""

    def __init__(self) -> None:
        self.fields: dict[str, None] = {}  # in the order of reading: a key has their values in it
        self.parameters: set[str] = set()
        self.whole = False

    def add(self, other: _Read) -> bool:
        """Add other inputs; return whether any of them is new."""
        before = (len(self.fields), len(self.parameters), self.whole)
        self.fields |= other.fields
        self.parameters |= other.parameters
        self.whole |= other.whole
        return before != (len(self.fields), len(self.parameters), self.whole)


class _Answers(Generic[Answer]):
    """Answers of one rule about jobs on one device, by the inputs that it has ever read of any
    job."""

    def __init__(self, rule: Rule[Answer], device: str) -> None:
        self._rule = rule
        self._device = device
        self._read = _Read()
        self._known: dict[Hashable, tuple[Answer, ...]] = {}
        #: The parameters' part of a key, by the id of the tuple that many jobs share; it is kept
        #: here too, so that no other gets its id.
        self._parts: dict[int, tuple[Parameters, Hashable]] = {}

    def about(self, job: Job) -> tuple[Answer, ...]:
        found = self._known.get(self._key(job))
        if found is None:
            read = _Read()
            found = tuple(self._rule(_watched(job, self._device, read)))
            if self._read.add(read):
                self._known.clear()
                self._parts.clear()
            self._known[self._key(job)] = found
        return found

    def _key(self, job: Job) -> Hashable:
        part = self._parts.get(id(job.parameters))
        if part is None:
            # With their types: 1, 1.0 and True are equal.
            told = tuple(
                (name, type(value), value)
                for name, value in job.parameters
                if self._read.whole or name in self._read.parameters
            )
            part = self._parts[id(job.parameters)] = (job.parameters, told)
        return part[1], *[getattr(job, name) for name in self._read.fields]


class _WatchedParameters(Mapping[str, Any]):
    """Parameters that note which of them are looked at, absent ones too."""

    def __init__(self, parameters: Parameters, read: _Read) -> None:
        self._values = dict(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read.parameters.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        self._read.whole = True
        return iter(self._values)

    def __len__(self) -> int:
        self._read.whole = True
        return len(self._values)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type, tuple[dict[str, Any]]]:
        """Pickle and copy as a plain dict, which counts as reading all: its use is not watched."""
        return dict, (dict(self),)


class _Watched(JobDescription):
    """A job as rules see it, which notes what they look at."""

    __slots__ = ("_read",)
    _read: _Read

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_A_JOB:
            with contextlib.suppress(AttributeError):  # of a copy, for which all was read
                object.__getattribute__(self, "_read").fields[name] = None
        return object.__getattribute__(self, name)


def _watched(job: Job, device: str, read: _Read) -> JobDescription:
    parameters = _WatchedParameters(job.parameters, read)
    given = {name: getattr(job, name) for name in _OF_A_JOB}
    asked = _Watched(device=device, parameters=parameters, **given)
    object.__setattr__(asked, "_read", read)
    return asked
