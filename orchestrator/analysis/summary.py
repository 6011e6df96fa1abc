"""Summary of a run: rows in, one ``Summary`` out, which text, page and exports print."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from orchestrator.analysis.effects import Effect, Scaling, effects_of, scalings_of
from orchestrator.analysis.flags import (
    Flag,
    Raised,
    bounded,
    bounds_of,
    raised_by_job,
    ranked,
)
from orchestrator.analysis.hardware import (
    Comparison,
    Published,
    Roofline,
    against_published,
    far_below,
    roofline_of,
)
from orchestrator.analysis.metrics import StepTime, equal, step_times_of
from orchestrator.analysis.provenance import (
    Banner,
    Provenance,
    banners_of,
    provenance_of,
)
from orchestrator.analysis.rankings import (
    Front,
    HeadToHead,
    Ranking,
    fronts_of,
    head_to_head,
    rankings_of,
    throughput,
)
from orchestrator.analysis.replicates import Joined, join
from orchestrator.analysis.selection import (
    Setting,
    by_content,
    newest_final,
    settings_of,
    shared_by_workload,
)
from orchestrator.analysis.serving import Served, served_of
from orchestrator.analysis.tables import Table, tables_of
from orchestrator.analysis.timeline import Timeline, timeline_of
from orchestrator.core.card_check import SlowCard
from orchestrator.core.job import UNANSWERED, State
from orchestrator.core.labels import Label, batch_word, labels_of
from orchestrator.core.measurement import Measurement, Prediction
from orchestrator.core.plan import SEARCH_ENDED
from orchestrator.core.status import Answered, RunStatus
from orchestrator.grid.vocabulary import PricesBlock
from orchestrator.util.format import moment, plural, seconds
from workloads.util.statistics import ALIKE, Spread

#: States that answer whether a setting works here.
SETTLED = frozenset({State.SUCCEEDED, State.OUT_OF_MEMORY, State.UNSUPPORTED, State.PRUNED})


class StateWords(NamedTuple):
    """The words for a state."""

    short: str  # of a cell without a number, short enough for a column of figures
    meaning: str  # for legends


#: In the order of causes: what needs a person's attention comes first.
STATES: dict[State, StateWords] = {
    State.FAILED: StateWords("FAILED", "failed; see the reason"),
    State.TIMED_OUT: StateWords("timeout", "exceeded its time limit"),
    State.LOST: StateWords("lost", "its card or node disappeared"),
    State.NOT_STARTED: StateWords("not run", "the run ended before its turn"),
    State.OUT_OF_MEMORY: StateWords("OOM", "did not fit into the card's memory"),
    State.PRUNED: StateWords("pruned", "not tried, since a smaller batch size did not fit"),
    State.UNSUPPORTED: StateWords("unsup.", "cannot run on this device; nothing was tried"),
    State.RUNNING: StateWords("running", "under way"),
    State.PENDING: StateWords("pending", "waiting"),
    State.SUCCEEDED: StateWords("ok", "measured"),
}

_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{16}(?:-\d+)?\b|\d[\d.,]*")


class Cause(NamedTuple):
    """One reason and the rows that share it; ``example`` is the newest with a log's tail."""

    state: State
    failure_class: str
    reason: str  # of the example
    rows: tuple[Measurement, ...]
    example: Measurement


def causes_of(rows: Sequence[Measurement]) -> tuple[Cause, ...]:
    """Return rows that did not succeed, grouped by cause; accidents first, then the commonest."""
    groups: dict[tuple[State, str, str], list[Measurement]] = {}
    for row in rows:
        if row.state is not State.SUCCEEDED:
            key = (row.state, row.failure_class or "", _VARIABLE.sub("#", row.reason))
            groups.setdefault(key, []).append(row)
    causes = []
    for (state, failure_class, _), group in groups.items():
        example = ([row for row in group if row.failure_tail] or group)[-1]
        causes.append(Cause(state, failure_class, example.reason, tuple(group), example))
    order = list(STATES)
    return tuple(sorted(causes, key=lambda c: (order.index(c.state), -len(c.rows))))


def without_rule(cause: Cause) -> str:
    """Return the reason without the retry rule after it, or before it in rows of older versions."""
    kind = re.escape(cause.failure_class)
    reason = re.sub(
        rf" \({kind}(?: after \d+ attempts?[;,]|; retry \d).*$", "", cause.reason, flags=re.S
    )
    return re.sub(rf"^{kind} after \d+ attempts?; limit is \d+ retr\w+ \(.*?\): ", "", reason)


def retried(
    measurements: Sequence[Measurement], final: Mapping[str, Measurement]
) -> tuple[tuple[Measurement, ...], ...]:
    """Return the measuring attempts, oldest first, of jobs that failed at first in the invocation
    of their final row. A success that was measured again was flagged, and needed no other."""
    attempts: dict[str, list[Measurement]] = {}
    for row in measurements:
        last = final.get(row.job_id)
        if (
            last is not None
            and row.purpose == "measure"
            and row.invocation_id == last.invocation_id
            and row.started_at is not None
        ):
            attempts.setdefault(row.job_id, []).append(row)
    ordered = (tuple(sorted(rows, key=attrgetter("attempt_number"))) for rows in attempts.values())
    return tuple(rows for rows in ordered if any(r.state is not State.SUCCEEDED for r in rows[:-1]))


# ---------------------------------------------------------------- progress of a run

#: A live driver writes its status every second; a longer silence than this is suspicious.
STALE_AFTER_S = 120.0


def progress(status: RunStatus, silent_s: float) -> str:
    """``Under way: 12 of 48 jobs done, 8 running, about 42 min 00 s left.`` The driver, which has
    not reported its end, has been silent for so many seconds."""
    words = [f"{status.done:,} of {plural(status.total, 'job')} done"]
    if status.driver_died:
        return (
            f"Not finished: {words[0]}. Its driver died; the same `nightgrid run` resumes "
            f"it. Last heard of at {moment(status.at)}."
        )
    if silent_s > STALE_AFTER_S:
        return (
            f"Not finished: {words[0]}. The driver has been silent for "
            f"{seconds(silent_s)}, since {moment(status.at)}."
        )
    if status.running:
        words.append(f"{status.running:,} running")
    if status.waiting:
        words.append(f"waiting: {status.waiting}")
    if status.stopping:
        words.append(f"stopping: {status.stopping}")
    elif status.eta_s and status.eta_low_s is not None and status.eta_high_s is not None:
        words.append(f"{_rounded(status.eta_low_s)} to {_rounded(status.eta_high_s)} left")
    elif status.eta_s:
        words.append(f"about {_rounded(status.eta_s)} left")
    return f"Under way: {', '.join(words)}."


def stopped_sentence(reason: str, measured: int, asked: int) -> str:
    """``STOPPED (SIGINT received): 12 of 48 jobs measured.``"""
    return f"STOPPED ({reason}): {measured:,} of {plural(asked, 'job')} measured."


def _rounded(value: float) -> str:
    return seconds(float(max(1, round(value))))


# ---------------------------------------------------------------- the summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Flagged:
    """One flag with the rows that it applies to, each with the reason."""

    flag: Flag
    rows: tuple[tuple[Measurement, str], ...]

    @property
    def says(self) -> str:
        """Sentence on where these rows rank."""
        if self.flag.bounds:
            return "These rows rank as lower bounds: they are at least that fast."
        return f"These rows rank {self.flag.ranks}{' only' * (self.flag.league is not None)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Content of the report; ``rows`` holds the newest final row of each job."""

    run: str = ""
    rows: tuple[Measurement, ...] = ()
    attempts: int = 0  # of all jobs, over all invocations, probes included
    counts: Mapping[State, int] = field(default_factory=dict)  # in order of STATES, reversed
    damaged: tuple[str, ...] = ()  # files of the run that could not be read, with the reason
    banners: tuple[Banner, ...] = ()
    raised: Mapping[str, tuple[Raised, ...]] = field(default_factory=dict)  # by job id
    shared: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by workload
    head_to_head: tuple[HeadToHead, ...] = ()
    rankings: tuple[Ranking, ...] = ()  # of one unit the fastest first
    tables: tuple[Table, ...] = ()
    fronts: tuple[Front, ...] = ()
    effects: tuple[Effect, ...] = ()
    steps: tuple[StepTime, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    roofline: Roofline = field(default_factory=Roofline)
    published: tuple[Comparison, ...] = ()
    served: tuple[Served, ...] = ()
    causes: tuple[Cause, ...] = ()
    retried: tuple[tuple[Measurement, ...], ...] = ()  # attempts of jobs that needed several
    timeline: Timeline = field(default_factory=Timeline)
    provenance: Provenance = field(default_factory=Provenance)
    settings: Mapping[str, Setting] = field(default_factory=dict)  # by job id
    labels: Mapping[str, Label] = field(default_factory=dict)  # by job id
    joined: Joined = field(default_factory=lambda: Joined(rows=()))  # replicates as one cell each
    predictions: tuple[Prediction, ...] = ()  # of cells without a row or an answer
    status: RunStatus | None = None  # the last of its driver; None: unknown
    silent_s: float = 0.0  # since then

    @property
    def underway(self) -> RunStatus | None:
        """The status of a driver that has not reported its end."""
        return None if self.status is None or self.status.finished else self.status

    @property
    def answers(self) -> tuple[Answered, ...]:
        """The present answers to the questions of its grid."""
        return () if self.status is None else self.status.answers

    @property
    def flagged(self) -> tuple[Flagged, ...]:
        """Flags that some row has, each with its rows, by name."""
        by_flag: dict[str, tuple[Flag, list[tuple[Measurement, str]]]] = {}
        for row in self.rows:
            for one in self.raised.get(row.job_id, ()):
                by_flag.setdefault(one.flag.name, (one.flag, []))[1].append((row, one.reason))
        return tuple(
            Flagged(flag=flag, rows=tuple(rows)) for _, (flag, rows) in sorted(by_flag.items())
        )

    def at_least(self, row: Measurement) -> bool:
        """Return whether a row's throughput is a lower bound."""
        return bounded(self.raised.get(row.job_id, ()))

    def label(self, row: Measurement) -> str:
        """Return the label of a row's job: what varies in its grid."""
        known = self.labels.get(row.job_id)  # None for an attempt of a job without a final row
        return str(known or f"{row.model} {row.precision} {batch_word(row)}".strip())

    def chosen(self, row: Measurement) -> str:
        """Return the label of a row's choices, unique among rows of the same work."""
        return self.labels[row.job_id].choices or f"{row.precision} {batch_word(row)}".strip()

    def work(self, row: Measurement) -> str:
        """Return the label of a row's work, such as its method; "" if all rows have the same."""
        return self.labels[row.job_id].work

    def names(self, row: Measurement) -> tuple[str, ...]:
        """Return names of a row's job, longest first; each tells its model and its method."""
        label = self.labels.get(row.job_id)
        if label is None or label.where or label.work:
            return (self.label(row),)
        return self.label(row), self.chosen(row)

    @property
    def unsettled(self) -> int:
        """Number of jobs without an answer: failed, timed out, lost or not started."""
        without = sum(count for state, count in self.counts.items() if state not in SETTLED)
        return without - self.left_out

    @property
    def left_out(self) -> int:
        """Number of jobs that a search did not need for its answer."""
        return sum(row.reason.startswith(SEARCH_ENDED) for row in self.rows)

    @property
    def measured(self) -> int:
        """Number of jobs with a figure, flagged ones included."""
        return self.counts.get(State.SUCCEEDED, 0)

    @property
    def verdict(self) -> str:
        """One sentence on whether the night finished."""
        if self.underway is not None:
            return progress(self.underway, self.silent_s)
        if not self.rows:
            return "No row has been written yet."
        jobs = len(self.rows)
        planned = jobs if self.status is None else self.status.total
        if self.status is not None and self.status.stopping:
            # Rows may also be of an emulated night before it, or of cells that the grid had once.
            return stopped_sentence(self.status.stopping, self.status.measured, planned)
        if jobs < planned:
            missing = plural(planned - jobs, "job")
            damaged = plural(len(self.damaged), "file")
            why = f"; {damaged} could not be read" if self.damaged else ""
            return f"{missing} of {planned:,} planned have no row{why}; {self.measured:,} measured."
        if self.left_out:
            chosen = jobs - self.left_out
            lost = f"{self.unsettled:,} of them without an answer; " if self.unsettled else ""
            return (
                f"The search chose {chosen:,} of {jobs:,} jobs: {lost}{self.measured:,} measured."
            )
        if not self.unsettled:
            every = "The only job has" if jobs == 1 else f"All {jobs:,} jobs have"
            return f"{every} an answer; {self.measured:,} measured."
        return (
            f"{plural(self.unsettled, 'job')} of {jobs:,} ended without an answer; "
            f"{self.measured:,} measured."
        )


def summarize(
    measurements: Sequence[Measurement],
    damaged: Sequence[str] = (),
    *,
    status: RunStatus | None = None,
    silent_s: float = 0.0,
    published: Sequence[Published] = (),
    slow_cards: Sequence[SlowCard] = (),
    runs_differ: Spread = ALIKE,
    raised: Mapping[str, tuple[Raised, ...]] | None = None,
    prices: PricesBlock | None = None,
    predictions: Sequence[Prediction] = (),
) -> Summary:
    """Summarize the rows of one run, in the order in which they were written.

    ``runs_differ`` is the spread of the cards' speed from run to run, ``raised`` are flags by job
    id, if already derived; the others are fields of ``Summary``. Predictions of cells that have an
    answer by now do not count.
    """
    rows = by_content(newest_final(measurements))
    raised = raised_by_job(rows) if raised is None else raised
    settings = settings_of(rows, raised)
    joined = join(rows, settings, raised, runs=runs_differ)
    fit, bounds = ranked(joined.rows, raised), bounds_of(raised)
    whole = tuple(row for row in fit if row.job_id not in bounds)
    labels = labels_of(rows)
    labels |= {cell.row.job_id: labels[cell.replicates[0].job_id] for cell in joined.cells}
    counted = Counter(row.state for row in rows)
    answered = {row.job_id for row in rows if row.state not in UNANSWERED}
    unanswered = tuple(one for one in predictions if one.job_id not in answered)
    rankings, of_unit = rankings_of(fit, settings, bounds), Counter[str]()
    for one in rankings:
        of_unit[one.unit] += len(one.ranked)

    def place(one: Ranking) -> tuple[object, ...]:
        """Put the unit of most rows first, and of one unit the fastest."""
        return -of_unit[one.unit], one.unit, -throughput(one.fastest), one.setting

    return Summary(
        run=measurements[0].run if measurements else "",
        rows=rows,
        attempts=sum(1 for row in measurements if row.started_at is not None),
        damaged=tuple(damaged),
        counts={s: counted[s] for s in reversed(STATES) if counted[s]},
        banners=banners_of(rows, slow_cards, far_below(rows, published), joined.night_drift),
        raised=raised,
        shared=shared_by_workload(settings.values()),
        head_to_head=head_to_head(fit, settings, bounds),
        rankings=tuple(sorted(rankings, key=place)),
        tables=tables_of(joined.rows, settings, labels, raised, unanswered),
        fronts=fronts_of(fit, settings),
        effects=effects_of(fit, settings, bounds),
        steps=step_times_of(joined.rows),
        scalings=scalings_of(fit, settings, bounds),
        roofline=roofline_of(whole),
        published=against_published(whole, published),
        served=served_of(joined.rows, settings, prices, {row.job_id for row in whole}),
        causes=causes_of(rows),
        retried=retried(measurements, {row.job_id: row for row in rows}),
        timeline=timeline_of(measurements),
        provenance=provenance_of(rows, measurements),
        settings=settings,
        labels=labels,
        joined=joined,
        predictions=unanswered,
        status=status,
        silent_s=silent_s,
    )


def at_equal_quality(summary: Summary, limit: float | None = None) -> Summary:
    """Return the summary with fronts of only the rows whose output equals the plain path's."""
    rows = [row for row in ranked(summary.rows, summary.raised) if equal(row, limit)]
    return replace(summary, fronts=fronts_of(rows, summary.settings))
