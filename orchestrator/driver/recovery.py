"""Recovery from earlier drivers of a run: reuse their rows, end their processes."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.core.errors import ClusterError
from orchestrator.core.events import RecordRow
from orchestrator.core.job import Job, State
from orchestrator.core.outcome import RankOutcome
from orchestrator.core.plan import Action, PastRow, Plan
from orchestrator.driver.options import RunOptions
from orchestrator.driver.rows import row_maker
from orchestrator.driver.session import Session
from orchestrator.driver.standing import Standing
from orchestrator.on_ray.executor import RunningAttempt, outcome_of
from orchestrator.on_ray.outcomes import KeptOutcome
from orchestrator.scheduler.queues import replicated_cells
from orchestrator.store.codec import row_of
from orchestrator.store.history import cards_of_succeeded
from orchestrator.store.store import Store
from orchestrator.util.format import listed, plural
from orchestrator.worker.orphans import Owner, end_orphans


def owner_of(store: Store) -> Owner:
    """Owner of the processes that drivers of this run leave on a host."""
    return Owner(run_id=store.run_id, invocation_id=uuid.uuid4().hex[:12])


def clear_up(store: Store, say: Callable[[str], None]) -> None:
    """End processes of the run's earlier drivers on this host, and report them; agents do the same
    on their nodes (``on_ray/agent.py``). Raises ClusterError if a process does not end."""
    if store.taken_over_from is not None:
        say(f"taken over from a driver that died: {store.taken_over_from}")
    owner = Owner.of_this_process()
    assert owner is not None
    try:
        ended = end_orphans(owner)
    except TimeoutError as error:
        raise ClusterError(f"{error}; end them, then start the run again") from error
    if ended:
        shown = listed([f"{pid} {command[:40]}" for pid, command in ended.items()])
        say(f"ended its orphan processes here: {shown}")
    if store.note:
        say(store.note)
    for attempt_id in store.interrupted:
        say(f"attempt {attempt_id} was running then: LOST, its job is tried again")


def attempts_before(
    history: Sequence[PastRow], set_aside: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Number of the last attempt at each job that has rows, damaged ones included."""
    numbers = dict(set_aside or {})
    for row in history:
        numbers[row.job_id] = max(row.attempt_number, numbers.get(row.job_id, 0))
    return numbers


def cards_before(plan: Plan, store: Store) -> dict[str, set[tuple[str, int]]]:
    """Cards on which replicates of each cell were measured, by cell id: node names (a restarted
    cluster has other node ids) and indices."""
    cells = replicated_cells(planned.job for planned in plan.jobs)
    if not cells or not store.exists:
        return {}
    cell_of = {p.job.job_id: p.job.cell_id for p in plan.jobs if p.job.cell_id in cells}
    cards: dict[str, set[tuple[str, int]]] = {}
    for job_id, node, index in cards_of_succeeded(store.tables_path):
        if job_id in cell_of:
            cards.setdefault(cell_of[job_id], set()).add((node, index))
    return cards


def final_states(plan: Plan, history: Sequence[PastRow]) -> dict[str, State]:
    """State of each planned job: of its newest final row, real and emulated ones apart."""
    # Kinds of card without a node count as real.
    emulated = {node.accelerator: node.emulated for node in plan.nodes}
    newest = {
        (row.job_id, row.emulated): row.state for row in history if row.final and not row.outdated
    }
    states = {}
    for planned in plan.jobs:
        job = planned.job
        key = (job.job_id, emulated.get(job.accelerator, False))
        states[job.job_id] = newest.get(key, State.NOT_STARTED)
    return states


def measured_again(
    plan: Plan, standing: Standing, store: Store, options: RunOptions
) -> dict[str, int]:
    """Take earlier rows into ``standing``; returns the measurements left to jobs with flagged rows:
    one with --retry-flagged, else what the drivers of this command that died have left over."""
    rows = store.measurements(samples=False)
    standing.load(rows)
    there = {node.accelerator for node in plan.nodes}
    reused = (one.job for one in plan.jobs if one.action is Action.REUSE)
    jobs = {job.job_id: job for job in reused if job.accelerator in there}
    flagged = [
        job_id for job_id in standing.flagged(emulated=options.retry_flagged) if job_id in jobs
    ]
    if not options.restarted or options.supervisor is None:
        return dict.fromkeys(flagged, 1) if options.retry_flagged else {}
    began = options.supervisor.began
    measured = Counter(
        row.job_id
        for row in rows
        if row.state is State.SUCCEEDED and (row.recorded_at or 0.0) >= began
    )
    left = {
        job_id: jobs[job_id].measure.repeat_flagged + 1 - measured[job_id]
        if measured[job_id]
        else int(options.retry_flagged)
        for job_id in flagged
    }
    return {job_id: count for job_id, count in left.items() if count > 0}


# A dead driver's attempts have rows as LOST. An outcome that a node kept (``on_ray/outcomes.py``)
# becomes the row of one more attempt, so that a measured job is not measured again.


def recover_outcomes(
    session: Session,
    store: Store,
    plan: Plan,
    say: Callable[[str], None],
    write: Callable[[Callable[[], object]], object],
) -> None:
    """Write rows for interrupted attempts whose outcomes are stored on nodes, then forget the
    attempts; ``write`` calls what needs room on the disk."""
    owner = Owner.of_this_process()
    if not store.interrupted or owner is None:
        return
    outcomes = session.kept_outcomes(store.run_id)
    jobs = {planned.job.job_id: planned.job for planned in plan.jobs}
    made = row_maker(store, owner.invocation_id, store.history(), lambda: session.nodes)
    rows = []
    for record in recovered_records(outcomes, store.interrupted, jobs):
        try:
            row = made(record)
            row_of(row)
        except Exception as error:  # a value that no column holds, or of another version
            say(f"an outcome of job {record.job.job_id} is left out, it is no row: {error!r}")
        else:
            rows.append(row)
    if rows:
        write(lambda: store.append(*rows))
        count = plural(len(rows), "row")
        say(f"recovered {count} from outcomes that nodes kept for a driver that died")
    store.forget_interrupted()


def recovered_records(
    kept_outcomes: Iterable[KeptOutcome], interrupted: Collection[str], jobs: Mapping[str, Job]
) -> Iterator[RecordRow]:
    """Rows of interrupted attempts with outcomes of all ranks, each numbered after the LOST one;
    failed ones are retried. ``jobs``: the plan's, by id: an attempt of a search has the batch size
    that it tried, not the one that was asked for."""
    attempts: dict[str, RunningAttempt] = {}
    for request, ended in kept_outcomes:
        attempt, rank_outcome = request.attempt, outcome_of(ended, None)
        if attempt.attempt_id in interrupted and isinstance(rank_outcome, RankOutcome):
            running = attempts.setdefault(
                attempt.attempt_id, RunningAttempt(attempt=attempt, worker_ids=())
            )
            running.ended[request.rank] = rank_outcome
    for running in attempts.values():
        if len(running.ended) < len(running.attempt.cards):
            continue
        failures = [rank for rank in running.ended.values() if rank.state is not State.SUCCEEDED]
        running.first_failure = min(failures, key=lambda rank: rank.ended_at, default=None)
        number = running.attempt.number + 1
        attempt_id = f"{running.attempt.job_id}-{number}"
        attempt = replace(running.attempt, attempt_id=attempt_id, number=number)
        outcome = replace(running.outcome(), attempt_id=attempt_id)
        final = outcome.state is State.SUCCEEDED and attempt.purpose == "measure"
        asked = jobs.get(attempt.job_id, attempt.job).batch_size
        yield RecordRow(
            job=replace(attempt.job, batch_size=asked),
            state=outcome.state,
            reason="measured" if final else outcome.message,
            final=final,
            attempt=attempt,
            outcome=outcome,
        )
