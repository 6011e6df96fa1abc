"""Content as identity: what makes two jobs the same job, and what lets them share a loaded model.

Both are read from the declarations of the settings (``workloads/settings.py``). A setting of a
workload or an engine that is not installed here counts as it is: it always enters the id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrator.domain.job_fields import FIELDS
from workloads import registry

if TYPE_CHECKING:
    from orchestrator.domain.job import Job, Parameters, Scalar
    from workloads.settings import Declaration

_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

#: Values that thousands of jobs share, by the id of their parameters. The parameters are kept,
#: too, so that no other tuple gets the id: 1, 1.0 and True are equal and other settings.
_shared: dict[tuple[int, str, str], tuple[Parameters, dict[str, Scalar], str]] = {}
_MOST_SHARED = 4096


def identity(job: Job) -> dict[str, object]:
    """The meaning of the job. The experiment's name and the stopping rule are not part of it:
    renaming an experiment or asking for more repeats does not make it another job. The number of a
    replicate is, from 2 on, so that a job has the same id with replicates and without."""
    said: dict[str, object] = {
        name: declaration.value_in_id(value)
        for name, declaration in FIELDS.items()
        if declaration.enters_id(value := getattr(job, name))
    }
    said["parameters"] = _of_parameters(job)[0]
    if job.replicate > 1:
        said["replicate"] = job.replicate
    return said


def job_id(job: Job) -> str:
    """First 16 hex digits of the SHA-256 of the identity's canonical JSON."""
    return hashlib.sha256(_canonical_json(identity(job)).encode()).hexdigest()[:16]


def residency_key(job: Job) -> str:
    """Jobs with equal keys can share a loaded model in a warm worker."""
    shared = [str(getattr(job, name)) for name, declared in FIELDS.items() if declared.loads]
    return "|".join(shared) + _of_parameters(job)[1]


def _of_parameters(job: Job) -> tuple[dict[str, Scalar], str]:
    """The parameters' part of the identity and of the residency key."""
    key = (id(job.parameters), job.workload, job.engine)
    known = _shared.get(key)
    if known is None:
        if len(_shared) >= _MOST_SHARED:
            _shared.clear()
        entry = registry.WORKLOADS.get(job.workload)
        known_here = registry.declared(job.workload, job.engine)
        known = _shared[key] = (
            job.parameters,
            _said(job.parameters, known_here, entry.moved if entry is not None else {}),
            _loaded(job.parameters, known_here),
        )
    return known[1:]


def _said(
    parameters: Parameters, declared: Mapping[str, Declaration], moved: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    said = dict(moved)
    for name, value in parameters:
        declaration = declared.get(name)
        if declaration is None:
            said[name] = value
        elif declaration.enters_id(value):
            said[name] = declaration.value_in_id(value)
    return said


def _loaded(parameters: Parameters, declared: Mapping[str, Declaration]) -> str:
    """Parameters that change the loaded model; of an unknown workload any may."""
    others = {
        declared[name].loads_with
        for name, value in parameters
        if name in declared and not declared[name].is_default(value)
    }
    return "".join(
        f"|{name}={value}"
        for name, value in parameters
        if name not in declared or declared[name].loads or name in others
    )
