"""The settings of a job as this installation declares them: a job's own and its workload's.

Results outlive the version that measured them. A row may lack a setting that came later, say a
value that has another name now, or have a setting that moved to an engine. ``as_declared`` says
what such parameters mean today. A setting that nothing here declares, since it was removed or its
package is not installed, counts as work: rows that differ in it are never ranked.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.domain.job_fields import FIELDS
from workloads import registry
from workloads.settings import Declaration, Value


def declared_of(workload: str, engine: str) -> Mapping[str, Declaration]:
    """The declaration of every setting of such jobs, by name: a job's own, then its workload's."""
    return {**FIELDS, **registry.declared(workload, engine)}


def usual_engine(workload: str) -> str:
    """The engine of a job whose grid names none."""
    entry = registry.WORKLOADS.get(workload)
    return entry.default_engine if entry is not None else str(FIELDS["engine"].default)


def as_declared(workload: str, engine: str, parameters: Mapping[str, Value]) -> dict[str, Value]:
    """The parameters as this version would say them, defaults filled in. What a setting of another
    engine leaves as it is, is left out."""
    declared = registry.declared(workload, engine)
    said = {n: d.default for n, d in declared.items() if d.default is not ...}
    for name, value in parameters.items():
        if name in declared:
            said[name] = declared[name].current(value)
    for name in _beside(workload, declared, parameters):
        if parameters[name] is not None:
            said[name] = parameters[name]
    return said


def undeclared(workload: str, engine: str, parameters: Mapping[str, Value]) -> list[str]:
    """The names of parameters that nothing here declares."""
    return _beside(workload, registry.declared(workload, engine), parameters)


def _beside(
    workload: str, declared: Mapping[str, Declaration], parameters: Mapping[str, Value]
) -> list[str]:
    entry = registry.WORKLOADS.get(workload)
    moved = entry.moved if entry is not None else {}
    return [
        name
        for name, value in parameters.items()
        if name not in declared and not (name in moved and moved[name] == value)
    ]
