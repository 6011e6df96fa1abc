"""Plan: every job with its action and the reason, made by ``planning/planner.py``.

`nightgrid run` executes the very object that `nightgrid plan` prints.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, field
from enum import Enum

from orchestrator.core.job import Accelerator, Job, Scalar, State
from orchestrator.core.topology import Node
from workloads.base import MeasureSettings
from workloads.devices import host_device


@dataclass(frozen=True, slots=True)
class Span:
    """Likely duration in seconds."""

    low_s: float
    middle_s: float
    high_s: float

    def __add__(self, other: Span) -> Span:
        return Span(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def times(self, low: float, middle: float, high: float) -> Span:
        """Multiply each of the three by its own factor."""
        return Span(self.low_s * low, self.middle_s * middle, self.high_s * high)

    def or_longer(self, other: Span) -> Span:
        """The longer of the two, number by number."""
        return Span(*map(max, astuple(self), astuple(other)))


NOTHING = Span(0.0, 0.0, 0.0)


#: Detail of a row that identifies the saved things its job loaded by name.
TOOK = "took"
#: Beginning of the reason of cells that a search left out when it had its answer.
SEARCH_ENDED = "the search ended"
#: Detail of a row that names the lost cards of its node.
LOST = "lost_cards"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRow:
    """One earlier attempt."""

    job_id: str
    state: State
    final: bool
    emulated: bool
    workload: str
    model: str
    dataset: str = ""
    precision: str
    batch_size: int | None
    accelerator: Accelerator
    cards: int
    busy_s: float | None  # from start to end of the attempt
    took: str = ""  # savings of what it took by name
    load_s: float | None
    queued_s: float | None = None  # of busy_s, waiting for a turn on processors that others use
    reason: str = ""
    attempt_number: int = 0  # 0 when the job never ran
    parameters: tuple[tuple[str, Scalar], ...] = ()  # the workload's own, sorted by name
    outdated: str = ""  # how its work differs from that of the same settings now
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    recorded_at: float = 0.0  # seconds since the epoch


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
    """A job with its action and the reason."""

    job: Job
    action: Action
    reason: str = ""  # for all but a first RUN
    estimate_s: float = 0.0  # busy time of its cards, loading included
    load_s: float = 0.0  # of that, for loading
    needs: tuple[str, ...] = ()  # ids of the jobs that must have succeeded before
    after: tuple[str, ...] = ()  # ids of the jobs that must have ended before, in whatever way


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Jobs of a run with their actions, and what they are planned for."""

    grid_name: str
    jobs: tuple[PlannedJob, ...]
    nodes: tuple[Node, ...]
    duration: Span = NOTHING  # from the command to the last row (``forecast.py``)
    notes: tuple[str, ...] = ()  # for the reader, such as duplicate jobs
    host_notes: tuple[str, ...] = ()  # faults of the nodes' hosts, such as lost cards
    questions: tuple[str, ...] = ()  # of its grid, to be answered when it ends

    @property
    def host_packages(self) -> tuple[str, ...]:
        """Packages that the precisions of its jobs need on a processor, each once."""
        host = host_device()
        precisions = {item.job.precision for item in self.jobs if item.action is Action.RUN}
        needed = (host.precision(precision).packages for precision in precisions)
        return tuple(sorted({name for packages in needed for name in packages}))

    def __repr__(self) -> str:
        counts = Counter(item.action for item in self.jobs)
        actions = ", ".join(f"{counts[action]:,} {action}" for action in Action)
        return f"<Plan of {self.grid_name!r}: {actions}>"
