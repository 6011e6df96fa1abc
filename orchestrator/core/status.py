"""Status of a run: counts, what each card runs, and when it may end.

``board.py`` makes it; the driver shows it and writes it to ``status.json`` for `nightgrid status`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, TypeAlias

from pydantic import Field, TypeAdapter

from orchestrator.util.format import number

STATUS_VERSION = 1
#: Probability below which an answer is only the best so far.
UNLIKELY = 0.05
#: Numbers that JavaScript, and a time, can hold.
_LIMITS = Field(ge=-(2**53), le=2**53)
Real: TypeAlias = Annotated[float, _LIMITS]
Whole: TypeAlias = Annotated[int, _LIMITS]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardStatus:
    """One card: its node, and what its worker does. ``job`` is empty when it is idle."""

    card: str  # e.g. "hpu-1/HPU3"
    worker_id: str = ""
    phase: str = "free"  # free, starting, idle, or a phase of the attempt
    phase_age_s: Real = 0.0
    job: str = ""
    attempt_id: str = ""
    # Read from outside the worker's process; None: unknown.
    power_w: Real | None = None
    temperature_c: Real | None = None
    utilization_percent: Real | None = None
    memory_used_bytes: Whole | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Work of finished jobs over their timed part, in one unit (units are never added up)."""

    unit: str  # "tokens/s" or "samples/s"
    per_s: Real
    jobs: Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSoFar:
    """The fastest row of one piece of work while its run goes on."""

    job: str
    per_s: Real
    unit: str
    rows: Whole  # that compete
    provisional: str = ""  # why another row may yet come before it; empty if none can


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The present answer to a question of the grid: its best setting, and how sure that is."""

    question: str
    figure: str
    job: str = ""  # label of the setting; empty while no measured one keeps the limits
    job_id: str = ""
    value: Real = 0.0
    bound: str = ""  # ``at least`` or ``at most``: others on its host made its figure worse
    #: That it is the best of the cells of which something is known; without an answer, that there
    #: is none.
    probability: Real = 0.0
    confidence: Real  # that is asked for
    within: Real = 0.0  # share by which another may be better
    reached: bool = False
    times: Whole = 0  # that it was measured
    apart: Real = 0.0  # its measurements, as a share
    next: str = ""  # label of the second
    lead: Real | None = None  # over the second, as a share, with its 95 % interval
    lead_low: Real | None = None
    lead_high: Real | None = None
    measured: Whole = 0  # cells
    predicted: Whole = 0
    unknown: Whole = 0
    flagged: Whole = 0
    failed: Whole = 0
    changes: tuple[str, ...] = ()  # that would give another answer, the likeliest first
    file: str = ""  # the grid of its one job, in the run's directory
    launch: str = ""  # command that starts it as a server

    @property
    def sentence(self) -> str:
        """``int8 b=64 with probability 0.93, 2.1% ahead of int8 b=32``, with its figure."""
        if not self.job:
            if not (self.measured or self.predicted or self.flagged):
                return f"no measured setting has all figures of the question ({self.figure})"
            end = f": there is none with probability {self.chance}"
            return "no measured setting keeps the limits" + end
        lead = f", {self.lead_text} ahead of {self.next}" if self.next else ""
        best = f"within {100 * self.within:.3g}% of the best" if self.within else "the best"
        figure = f"{self.figure} {self.bound} {number(self.value)}".replace("  ", " ")
        if self.probability < UNLIKELY:
            best = f"the best so far, and {best}"
        return f"{self.job} ({figure}), {best} with probability {self.chance}{lead}"

    @property
    def chance(self) -> str:
        """The probability with two digits, of which no model is certain."""
        if self.probability > 0.99:
            return ">0.99"
        return f"{self.probability:.2f}" if self.probability > 0.01 else "<0.01"

    @property
    def lead_text(self) -> str:
        """``2.1% (0.8% to 3.4%)``."""
        lead, low, high = (one or 0.0 for one in (self.lead, self.lead_low, self.lead_high))
        return f"{lead:.1%} ({low:.1%} to {high:.1%})"

    @property
    def basis(self) -> str:
        """``24 cells measured, 100 predicted, 4 failed``, and whether that is enough."""
        counts = {
            "measured": self.measured,
            "flagged": self.flagged,
            "predicted": self.predicted,
            "not known": self.unknown,
            "failed": self.failed,
        }
        words = [f"{count:,} {name}" for name, count in counts.items() if count]
        enough = "reached" if self.reached else "not reached"
        text = f"cells: {', '.join(words) or 'none'}; confidence {self.confidence:.2f} {enough}"
        if self.times > 1:
            text += f"; it was measured {self.times} times, {self.apart:.1%} apart"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """A failed attempt, to be retried or not."""

    at: Real  # seconds since the epoch
    job: str
    state: str  # FAILED, TIMED_OUT or LOST
    failure_class: str
    reason: str
    card: str  # its first one
    final: bool  # it is not tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one moment."""

    run: str
    at: Real  # seconds since the epoch
    started_at: Real  # by the clock as it is now: always as long ago as the run really takes
    total: Whole  # jobs of the grid
    done: Whole  # of those, terminal: reused ones included
    counts: Mapping[str, Whole]  # terminal jobs of this invocation by state, and "reused"
    attempts: Whole  # ended, probes and retries included
    emulated: bool  # whether any card is
    cards: tuple[CardStatus, ...]
    eta_s: Real | None  # None when unknown
    eta_low_s: Real | None = None  # while little of the run is done: the range that it is in
    eta_high_s: Real | None = None
    #: ``Startup.kind``, and seconds from the command to the first attempt; None before that, and
    #: if the run waited for cards of others.
    start: str = ""
    first_attempt_s: Real | None = None
    promised_low_s: Real | None = None  # from the command to the last row, as it was planned
    promised_high_s: Real | None = None
    stopping: str = ""  # reason of a stop request
    paused: str = ""  # why nothing new is started for now; empty while all is well
    waiting: str = ""  # for whose cards, while it has none or nothing to do on them
    trouble: str = ""  # what is wrong with the cluster, while work goes on
    slow_cards: tuple[str, ...] = ()  # sentences, the slowest first (``core/card_check.py``)
    finished: bool = False
    jobs_run: Whole = 0  # terminal after at least one attempt, in this invocation
    rates: tuple[Rate, ...] = ()
    failures: tuple[FailedAttempt, ...] = ()  # the last ones, newest first
    failure_counts: Mapping[str, Whole] = field(default_factory=dict)  # attempts by failure class
    flag_counts: Mapping[str, Whole] = field(default_factory=dict)  # rows that stand, by flag
    final_rows: Whole = 0  # of the run, those of earlier invocations included
    repeats: Whole = 0  # further measurements, of flagged rows and of winners
    best: tuple[BestSoFar, ...] = ()  # a piece of work each
    answers: tuple[Answered, ...] = ()  # to the questions of its grid
    #: Set by the reader of the status: the driver is gone and did not finish.
    driver_died: bool = False

    def without_driver(self) -> RunStatus:
        """Status of a run whose driver has died: nothing runs."""
        idle = tuple(CardStatus(card=card.card) for card in self.cards)
        return replace(
            self, driver_died=True, cards=idle, eta_s=None, eta_low_s=None, eta_high_s=None
        )

    @property
    def measured(self) -> int:
        """Jobs with a successful row, of this invocation or an earlier one."""
        return sum(self.counts.get(name, 0) for name in ("SUCCEEDED", "reused"))

    @property
    def elapsed_s(self) -> float:
        """Time since the run started."""
        return self.at - self.started_at

    @property
    def jobs_per_h(self) -> float | None:
        """Jobs run per hour; None before the first is done."""
        known = self.jobs_run and self.elapsed_s > 0
        return 3600 * self.jobs_run / self.elapsed_s if known else None

    @property
    def assigned(self) -> int:
        """Cards with an attempt on them."""
        return sum(1 for card in self.cards if card.attempt_id)

    @property
    def running(self) -> int:
        """Attempts on cards now; a gang counts once."""
        return len({card.attempt_id for card in self.cards if card.attempt_id})

    def to_json(self) -> str:
        """The content of ``status.json``."""
        return json.dumps({"version": STATUS_VERSION} | dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> RunStatus:
        """Read ``status.json``, ignoring unknown fields; raises ValueError if it is not JSON, of
        another version, or lacks a field."""
        version = TypeAdapter(dict[str, object]).validate_json(text).get("version")
        if version != STATUS_VERSION:
            raise ValueError(f"status version {version}; this program reads {STATUS_VERSION}")
        # Only a reader of the file can say that the driver died.
        return replace(_reader().validate_json(text, strict=True), driver_died=False)


@cache
def _reader() -> TypeAdapter[RunStatus]:
    return TypeAdapter(RunStatus)
