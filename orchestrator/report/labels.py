"""Labels of jobs in a report, made of their choices.

Rows that did the same work are told apart by their choices: the precision, the batch size, and
every other setting of that role which is not at its default. What changes nothing that is measured
is left out, unless two such rows differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.domain.declared import usual_engine
from orchestrator.domain.job import Scalar
from orchestrator.domain.job_fields import FIELDS
from orchestrator.domain.measurement import Measurement
from orchestrator.report.contests import work_of
from orchestrator.report.grouping import Setting
from workloads import registry
from workloads.settings import Role


def labels_of(rows: Sequence[Measurement], settings: Mapping[str, Setting]) -> dict[str, str]:
    """The choices of each row, by job id: no two that did the same work have the same words."""
    alike: dict[tuple[Setting, str], list[Measurement]] = {}
    for row in rows:
        alike.setdefault((work_of(settings[row.job_id]), choice(row)), []).append(row)
    return {
        row.job_id: " ".join([words, *_unusual(row, "neutral")]) if len(group) > 1 else words
        for (_, words), group in alike.items()
        for row in group
    }


def choice(row: Measurement) -> str:
    """The choices of a row, short: ``bf16 b=32``, with every other one not at its default."""
    words = [row.precision, _batch_size(row)]
    if row.engine != usual_engine(row.workload):
        words.append(row.engine)
    if row.isolation != FIELDS["isolation"].default:
        words.append(f"isolation {row.isolation}")
    return " ".join([*words, *_unusual(row, "choice")])


def label(row: Measurement) -> str:
    """A job on one line, for lists: ``chatglm3-6b fp32 b=128 on 1 × HPU``."""
    again = f" replicate {row.replicate}" if row.replicate > 1 else ""
    return f"{row.model} {choice(row)} on {row.cards} × {row.accelerator}{again}"


def _batch_size(row: Measurement) -> str:
    asked = row.batch_size_requested
    if asked.isdecimal() or row.batch_size is None:
        return f"b={asked}"
    return f"b={row.batch_size} ({asked})"


def _unusual(row: Measurement, role: Role) -> Iterator[str]:
    """The parameters of a role that are not at their defaults, in the order of declaration."""
    for name, declaration in registry.declared(row.workload, row.engine).items():
        if declaration.role == role and name in row.parameters:
            value = declaration.current(row.parameters[name])
            if not declaration.is_default(value):
                yield _said(name.replace("_", " "), value)


def _said(name: str, value: Scalar) -> str:
    if isinstance(value, bool) or value is None:
        return name if value else f"no {name}"
    return f"{name} {value}"
