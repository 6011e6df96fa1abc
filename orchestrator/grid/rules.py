"""Memoised rules of workloads (``workloads/base.py``).

Jobs with equal parameters that agree in all fields the rule has ever read share one answer: of ten
thousand jobs a rule sees some hundred.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

from orchestrator.core.job import Job
from workloads.base import JobDescription

Answer = TypeVar("Answer")
Rule = Callable[[JobDescription], Sequence[Answer]]

_FIELDS = frozenset(field.name for field in fields(JobDescription)) - {"device", "parameters"}


class Rules(Generic[Answer]):
    """Asks the rules of workloads; ``rule_of`` finds that of a name, if there is one."""

    def __init__(self, rule_of: Callable[[str], Rule[Answer] | None]) -> None:
        self._rule_of = rule_of
        #: By workload and device: the fields that were read, in order, and the answers.
        self._known: dict[
            tuple[str, str], tuple[dict[str, None], dict[Hashable, tuple[Answer, ...]]]
        ] = {}

    def answers(self, job: Job, device: str) -> tuple[Answer, ...]:
        """Answers of the rule of the job's workload on a device."""
        rule = self._rule_of(job.workload)
        if rule is None:
            return ()
        read, known = self._known.setdefault((job.workload, device), ({}, {}))
        key = (job.typed_parameters, *[getattr(job, name) for name in read])
        if key not in known:
            before = len(read)
            answers = tuple(rule(_description(job, device, read)))
            if len(read) > before:
                known.clear()  # their keys lack what is read now
                key = (job.typed_parameters, *[getattr(job, name) for name in read])
            known[key] = answers
        return known[key]


class _Description(JobDescription):
    """A job as rules see it, which notes the fields that they read."""

    __slots__ = ("read",)
    read: dict[str, None]

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            with contextlib.suppress(AttributeError):  # of a copy, for which all was read
                object.__getattribute__(self, "read")[name] = None
        return object.__getattribute__(self, name)


def _description(job: Job, device: str, read: dict[str, None]) -> JobDescription:
    own = {name: getattr(job, name) for name in _FIELDS}
    description = _Description(device=device, parameters=dict(job.parameters), **own)
    object.__setattr__(description, "read", read)
    return description
