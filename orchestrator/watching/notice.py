"""Notification about a run that has ended: one JSON object for programs, with a text for people.

The field ``text`` is what Slack, Mattermost and their like show of a message; everything else is
for a script that wants to know more. The fields are documented in ``docs/live.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from orchestrator.util.format import finite, one_line

if TYPE_CHECKING:
    from orchestrator.analysis.comparison import RunComparison
    from orchestrator.analysis.rankings import Contest
    from orchestrator.analysis.summary import Summary

NOTICE_VERSION = 1
BEST_SHOWN = 5  # in the text; the field ``best`` has them all
REASON_LENGTH = 500


class Ending(str, Enum):
    """End of `nightgrid run`."""

    FINISHED = "finished"  # every job has an answer
    UNANSWERED = "unanswered"  # every job was tried, and some failed, were lost or timed out
    STOPPED = "stopped"  # by a signal, a deadline or the circuit breaker; some jobs never ran
    FAILED = "failed"  # the run itself could not go on
    INTERRUPTED = "interrupted"  # its driver died, and another one goes on: it has not ended

    __str__ = str.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A run that has ended. ``summary`` is None when its rows could not be read."""

    run: str
    ending: Ending
    reason: str
    exit_code: int
    host: str
    rows: str = ""  # directory of the rows
    report: str = ""  # path of the page, "" if there is none
    summary: Summary | None = None
    since: RunComparison | None = None  # with the run that measured the same jobs last

    def values(self) -> dict[str, Any]:
        """The JSON object."""
        summary = self.summary
        counts = {} if summary is None else {str(s): n for s, n in summary.counts.items()}
        emulated = summary is not None and any(row.emulated for row in summary.rows)
        return {
            "version": NOTICE_VERSION,
            "text": self.text(),
            "run": self.run,
            "state": str(self.ending),
            "reason": self.reason,
            "exit_code": self.exit_code,
            "jobs": sum(counts.values()),
            "counts": counts,
            "emulated": emulated,
            "wall_s": finite(summary.timeline.wall_s) if summary is not None else None,
            "best": [_best(contest) for contest in (summary.contests if summary else ())],
            "since": _since(self.since),
            "host": self.host,
            "rows": self.rows,
            "report": self.report,
        }

    def text(self) -> str:
        """A few lines for people, in which nothing has a meaning for a chat program."""
        from orchestrator.report.all_runs import since_text  # a run that begins needs it not
        from orchestrator.report.answers import best_text

        lines = [f"Nightgrid run {self.run} {_WORDS[self.ending]} on {self.host}."]
        if self.ending in (Ending.STOPPED, Ending.FAILED, Ending.INTERRUPTED):
            lines.append(one_line(self.reason, REASON_LENGTH))
        summary = self.summary
        if summary is not None:
            lines.append(", ".join(f"{count} {state}" for state, count in summary.counts.items()))
            lines += [
                best_text(contest, summary.chosen(contest.fastest))
                for contest in summary.contests[:BEST_SHOWN]
            ]
            if self.since is not None:
                lines.append(since_text(self.since))
            if any(row.emulated for row in summary.rows):
                lines.append("Emulated cards: no figure is one of a real card.")
        if self.report:
            lines.append(f"Report: {self.report}")
        return _plain("\n".join(line for line in lines if line))


_WORDS = {
    Ending.FINISHED: "has finished",
    Ending.UNANSWERED: "has finished; some jobs have no answer",
    Ending.STOPPED: "was stopped",
    Ending.FAILED: "has failed",
    Ending.INTERRUPTED: "was interrupted",
}


def _since(found: RunComparison | None) -> dict[str, Any] | None:
    if found is None:
        return None
    significant = [change for change in found.changes if change.significant]
    return {
        "run": found.before,
        "slower": sum(change.ratio.value < 1 for change in significant),
        "faster": sum(change.ratio.value > 1 for change in significant),
        "unchanged": len(found.changes) - len(significant),
        "broken": len(found.broken),
        "overall_ratio": finite(found.overall),
    }


def _best(contest: Contest) -> dict[str, Any]:
    row, metrics = contest.fastest, contest.fastest.metrics
    return {
        "model": row.model,
        "workload": row.workload,
        "where": contest.setting.where,
        "precision": row.precision,
        "batch_size": row.batch_size,
        "engine": row.engine,
        "throughput": finite(metrics.throughput),
        "throughput_unit": contest.unit,
        "throughput_low": finite(metrics.throughput_low),
        "throughput_high": finite(metrics.throughput_high),
        "not_told_apart_from": len(contest.tied),
        "verdict": contest.verdict.value,
        "emulated": row.emulated,
        "job_id": row.job_id,
    }


def _plain(text: str) -> str:
    """The three characters by which Slack knows links and mentions, as it wants them written."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
