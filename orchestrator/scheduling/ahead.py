"""Short jobs that a busy worker is given ahead, so that its card does not wait for the driver.

Between two jobs a card waits for its agent, the driver and a call of Ray: nothing beside a job of a
minute, most of the time beside one of a millisecond. So a worker whose last job was short is given
more of the same bucket than the one that it runs. An attempt given ahead begins when the one before
it on its worker has succeeded, and never otherwise: what is behind a failure waits for cards again,
is blamed for nothing, and has a row that says so. So is what waits for too long, since a job took
longer than it should (``worker/card_process.py``).

A job that is given early may end late. So only jobs that are expected to be short are, by what the
last of their bucket took; all that wait behind one job together take no longer than the run allows
(``ScheduleSettings.ahead_s``), and no worker gets more than its share of what is left, unless that
is over before another worker could be told of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.job import State
from orchestrator.core.outcome import Outcome

#: Jobs that may wait behind one on its worker: enough that the shortest ones last until the driver
#: has handled the ends of many together, and sent more.
MOST_AHEAD = 31
#: Jobs that are expected to last longer are never given ahead, in a run that allows it at all.
AHEAD_S = 0.1
#: Jobs that take no longer together may be more than a worker's share of what is left: a response
#: and its answer take as long (``worker/messages.py``), so shared out they would end no sooner.
ANSWER_S = 0.01


@dataclass(frozen=True, slots=True)
class Pace:
    """The time that a bucket's last job took, beside its estimate."""

    took_s: float
    estimated_s: float

    def expected_s(self, estimated_s: float) -> float:
        """Seconds that a job of this estimate should take: in proportion, and no less than the
        last."""
        return self.took_s * max(1.0, estimated_s / max(self.estimated_s, 1e-9))

    def expected_together_s(self, estimates_s: Sequence[float]) -> float:
        """Seconds that jobs of these estimates should take one after the other."""
        if max(estimates_s, default=0.0) <= self.estimated_s:
            return self.took_s * len(estimates_s)
        return sum(map(self.expected_s, estimates_s))


def pace_after(before: Pace | None, outcome: Outcome, estimated_s: float) -> Pace | None:
    """The pace of a bucket once another of its jobs has ended; None where that failed. A long job
    is remembered over the next few short ones. Waiting for a turn at the host's cores is no work of
    the card."""
    if outcome.state is not State.SUCCEEDED or not outcome.ranks:
        return None
    waited_s = max(rank.turn.waited_s if rank.turn is not None else 0.0 for rank in outcome.ranks)
    took_s = max(rank.ended_at - rank.started_at for rank in outcome.ranks) - waited_s
    return Pace(max(took_s, before.took_s / 2 if before is not None else 0.0), estimated_s)


def may_have_more(ahead_s: Sequence[float], pace: Pace, *, left: int, workers: int) -> bool:
    """Return whether a busy worker may be given one more job, as far as their number goes.

    Args:
        ahead_s: estimates of those that wait behind the worker's own already.
        left: jobs of the bucket that no worker has, this one included.
        workers: that serve the bucket.
    """
    given = len(ahead_s)
    if given >= MOST_AHEAD or not left:
        return False
    return left > given * workers or pace.expected_together_s(ahead_s) < ANSWER_S


def may_wait_behind(
    estimate_s: float, ahead_s: Sequence[float], pace: Pace, *, most_s: float
) -> bool:
    """Return whether a job is short enough to be given to a busy worker.

    Args:
        estimate_s: of the job.
        ahead_s: estimates of those that wait behind the worker's own already.
        most_s: all that wait may take together, at this pace.
    """
    return pace.expected_together_s(ahead_s) + pace.expected_s(estimate_s) <= most_s
