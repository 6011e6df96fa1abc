"""Tasks: the kinds of models. Each file here declares one (``base.py``).

Another installed package names one under the entry points ``nightgrid.tasks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.declared import Declared
from workloads.tasks.base import TaskSpec

if TYPE_CHECKING:
    from workloads.models.checkpoint_kind import CheckpointKind

#: Every task.
TASKS: Declared[TaskSpec] = Declared("workloads.engines.tasks", TaskSpec, "nightgrid.tasks")


def task_of(kind: CheckpointKind) -> TaskSpec | None:
    """The task that takes a checkpoint: what its class says comes before its family; None where
    neither says anything that is known here."""
    for spec in TASKS.known():
        if spec.takes(kind):
            return spec
    return next((spec for spec in TASKS.known() if kind.model_type in spec.model_types), None)
