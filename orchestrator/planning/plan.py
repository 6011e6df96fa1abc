"""jobs + cluster + what is already measured -> Plan; printable before anything starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from orchestrator.domain.job import Job
from orchestrator.domain.span import NOTHING, Span
from orchestrator.domain.topology import Node
from workloads.devices import host_device


class Action(str, Enum):
    """A run's treatment of a job."""

    RUN = "run"
    REUSE = "reuse"  # has a successful row already
    SKIP = "skip"  # failed earlier in this run; --retry-failed tries it again
    UNSUPPORTED = "unsupported"  # becomes a row with the reason

    __str__ = str.__str__
    __hash__ = str.__hash__  # thousands of jobs are counted by it; Enum's own is in Python


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job, what will be done with it, and why."""

    job: Job
    action: Action
    reason: str = ""  # for all but a first RUN
    estimate_s: float = 0.0  # busy time of its cards, loading included
    needs: tuple[str, ...] = ()  # ids of the jobs that must have succeeded before
    after: tuple[str, ...] = ()  # ids of the jobs that must have ended before, in whatever way


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """The plan that `nightgrid plan` prints and `nightgrid run` executes: the very same object."""

    grid_name: str
    jobs: tuple[PlannedJob, ...]
    nodes: tuple[Node, ...]
    duration: Span = NOTHING  # from the command to the last row (``duration.py``)
    notes: tuple[str, ...] = ()  # what a reader should know, such as jobs asked for twice

    @property
    def host_packages(self) -> tuple[str, ...]:
        """Packages that the precisions of its jobs need on a processor, each once."""
        host = host_device()
        precisions = {item.job.precision for item in self.jobs if item.action is Action.RUN}
        needed = (host.precision(precision).packages for precision in precisions)
        return tuple(sorted({name for packages in needed for name in packages}))

    def __repr__(self) -> str:
        counts = Counter(item.action for item in self.jobs)
        told = ", ".join(f"{counts[action]:,} {action}" for action in Action)
        return f"<Plan of {self.grid_name!r}: {told}>"
