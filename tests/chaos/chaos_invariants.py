"""Laws of the rows after a night of faults, and times of recovery. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from chaos_plan import ALL_AT_ONCE, ON_A_FULL_DISK, Fault

from orchestrator.core.job import State, supersedes
from orchestrator.core.measurement import Measurement

#: How a job that goes wrong of itself must end: its states, and a word of its reason.
ENDS: Mapping[str, tuple[set[State], str]] = {
    "work": ({State.SUCCEEDED}, ""),
    "segfault": ({State.FAILED}, "SIGSEGV"),
    "abort": ({State.FAILED}, "SIGABRT"),
    "allocate": ({State.FAILED, State.OUT_OF_MEMORY}, "host_out_of_memory"),
    "hold-gil": ({State.TIMED_OUT, State.LOST}, "hung"),
    "hang": ({State.TIMED_OUT, State.LOST}, "hung"),
    "stubborn": ({State.TIMED_OUT, State.LOST}, "hung"),
    "raise": ({State.FAILED}, "as asked"),
}
_NODE_GONE = ("node ", "spawner", "connection")
_CLUSTER_GONE = ("control store", "driver", *_NODE_GONE)
#: What a row may say, for its attempt to be explained by a fault of this kind on its card, its node
#: or its driver. A kind that is not here explains nothing.
SAYS: Mapping[str, tuple[str, ...]] = {
    "kill a worker": ("SIGKILL",),
    "segfault a worker": ("SIGSEGV",),
    "freeze a worker": ("hung", "stopped by a signal"),  # of one card, of a gang
    "kill a node's agent": ("node ",),
    "kill a spawner": ("spawner", "node "),
    "kill a raylet": _NODE_GONE,
    "freeze a raylet": _NODE_GONE,
    "kill the driver": ("driver",),
    "kill the driver under its supervisor": ("driver",),
    ON_A_FULL_DISK: ("driver",),
    ALL_AT_ONCE: ("driver",),
    "kill the control store": _CLUSTER_GONE,
    "restart the head": _CLUSTER_GONE,
    "restart the cluster": _CLUSTER_GONE,
}
#: Faults after which work has to be found to go on; a full disk pauses it.
INTERRUPTING = (*SAYS, "fill the disk")
#: What all nodes and the driver may die of, a while later.
OF_CLUSTER = ("kill the control store", "restart the head", "restart the cluster")
OF_DRIVER = (
    "kill the driver",
    ON_A_FULL_DISK,
    ALL_AT_ONCE,
    "kill the driver under its supervisor",
)
#: From a fault to the end of the attempt that it hit, at most: a frozen worker is noticed last.
_NOTICED_WITHIN_S = 60.0
#: No attempt of these nights works for longer.
_LONGEST_S = 600.0
#: From the death of a server to the last attempt that is sent to it: Ray calls a silent one dead
#: after 15 s (its health checks' period, times the failures that it allows), and is slow at times.
_UNHEARD_S = 25.0
_DRIVER_NAMED = re.compile(r"its driver, process (\d+) on ")


def expected_end(row: Measurement) -> tuple[set[State], str]:
    behaviour = str(row.parameters["behaviour"])
    if behaviour == "grow":
        fits = (row.batch_size or 0) <= int(str(row.parameters["largest"]))
        return ({State.SUCCEEDED}, "") if fits else ({State.OUT_OF_MEMORY, State.PRUNED}, "memory")
    return ENDS[behaviour]


def with_true_times(rows: Iterable[Measurement], faults: Iterable[Fault]) -> list[Measurement]:
    """The rows with the times that a clock would have told that was never stepped. A night is much
    shorter than a step, so it is plain which times are wrong. The end of an attempt is as much
    later than its start as it lasted, so both are wrong by the same."""
    steps = [fault for fault in faults if fault.offset_s]

    def true(at: float | None) -> float | None:
        for step in steps:
            if at is not None and step.at - 2.0 <= at - step.offset_s <= step.ended_at + 2.0:
                return at - step.offset_s
        return at

    def dated_anew(row: Measurement) -> Measurement:
        start, end = true(row.started_at), true(row.ended_at)
        if None not in (start, row.started_at, row.ended_at) and start != row.started_at:
            end = row.ended_at + (start - row.started_at)  # type: ignore[operator]
        return dataclasses.replace(
            row, started_at=start, ended_at=end, recorded_at=true(row.recorded_at)
        )

    return [dated_anew(row) for row in rows] if steps else list(rows)


def lost(rows: Iterable[Measurement], jobs: Collection[str]) -> list[str]:
    there = {row.job_id for row in rows if row.final}
    return sorted(set(jobs) - there)


def duplicated(rows: Iterable[Measurement]) -> list[str]:
    """Attempts with two rows, and jobs with two final rows that measured something or two of one
    invocation: nothing runs twice for nothing."""
    rows = list(rows)
    attempts = Counter((row.invocation_id, row.attempt_id) for row in rows)
    finals = Counter((row.invocation_id, row.job_id) for row in rows if row.final)
    measured = Counter(row.job_id for row in rows if row.state is State.SUCCEEDED and row.final)
    return sorted(
        [f"attempt {key[1]}" for key, count in attempts.items() if count > 1]
        + [f"job {key[1]} twice in one invocation" for key, count in finals.items() if count > 1]
        + [f"job {job_id} measured twice" for job_id, count in measured.items() if count > 1]
    )


def standing(rows: Iterable[Measurement]) -> dict[str, Measurement]:
    """The row that stands for each job."""
    best: dict[str, Measurement] = {}
    for row in sorted(rows, key=lambda row: row.recorded_at or 0.0):
        if row.final and (row.job_id not in best or supersedes(row.state, best[row.job_id].state)):
            best[row.job_id] = row
    return best


def wrong_ends(rows: Sequence[Measurement], faults: Sequence[Fault]) -> list[str]:
    """Jobs that did not end as they must. One that works may fail if every try of it was hit."""
    problems = []
    tries: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.attempt_number and row.started_at is not None:
            tries.setdefault(row.job_id, []).append(row)
    for row in standing(rows).values():
        states, word = expected_end(row)
        if row.state in states and word in row.reason:
            continue
        own = tries.get(row.job_id, [])
        if own and all(explained(attempt, faults) for attempt in own):
            continue
        problems.append(f"{row.parameters} b={row.batch_size}: {row.state}: {row.reason}")
    return problems


def explained(row: Measurement, faults: Iterable[Fault]) -> bool:
    """Return whether a fault hit this attempt on its card, its node or its driver, in its time, and
    its row says what the fault did."""
    return any(_explains(fault, row) for fault in faults)


def _explains(fault: Fault, row: Measurement) -> bool:
    if row.started_at is None or row.ended_at is None:
        return False
    if not any(word in row.reason for word in SAYS.get(fault.kind, ())):
        return False
    driver = _DRIVER_NAMED.search(row.reason)
    if driver is not None and fault.kind not in OF_CLUSTER:
        # It began before the death; its row was made of its note, so it has no end of its own.
        in_its_time = row.started_at - 1.0 <= fault.at <= row.started_at + _LONGEST_S
        return fault.kind in OF_DRIVER and int(driver[1]) == fault.pid and in_its_time
    if fault.kind in OF_DRIVER:
        return False
    known = fault.card is not None and row.cards == 1 and fault.pid and row.worker_pid
    if known and fault.pid != row.worker_pid:
        return False  # another process on the card
    here = not fault.node or (
        _on(fault.node, row)
        and (fault.hits_node or fault.card is None or fault.card in row.card_indices)
    )
    unheard_s = _UNHEARD_S if fault.hits_node and row.state is State.LOST else 1.0
    began_before_its_end = row.started_at - unheard_s <= fault.ended_at
    if "did not start" in row.reason or known:
        # The attempt was over before it began, or was given to a process that was dead already.
        began_before_its_end = True
    if driver is not None:
        return here and began_before_its_end and fault.at <= row.started_at + _LONGEST_S
    noticed = row.ended_at - fault.ended_at <= _NOTICED_WITHIN_S
    return here and began_before_its_end and fault.at <= row.ended_at + 1.0 and noticed


def _on(node: str, row: Measurement) -> bool:
    """Return whether an attempt was on this server. One that comes back while Ray still knows it
    from before gets a name like ``hpu-1-7ace``."""
    return any(name == node or name.startswith(f"{node}-") for name in row.nodes)


def unexplained(rows: Sequence[Measurement], faults: Sequence[Fault]) -> list[str]:
    """Attempts at jobs that work which did not succeed, although nothing was done to them; and
    reasons that do not say what was done."""
    return [
        f"{row.attempt_id} on {row.nodes} {row.card_indices}, {row.started_at} to {row.ended_at}: "
        f"{row.state}: {row.reason}"
        for row in rows
        if expected_end(row)[0] == {State.SUCCEEDED}
        and row.state is not State.SUCCEEDED
        and row.attempt_number
        and row.started_at is not None
        and not explained(row, faults)
    ]


def recovery_s(rows: Sequence[Measurement], faults: Sequence[Fault]) -> dict[str, list[float]]:
    """For each kind of fault, the seconds until work went on: on the card that was hit, on any
    card of the node that was hit, and anywhere after a driver's death."""
    found: dict[str, list[float]] = {}
    starts = sorted(
        # Rows of attempts that really ran: some are made up when a worker does not come up.
        ((row.started_at, row) for row in rows if row.started_at and row.worker_pid),
        key=lambda pair: pair[0],
    )
    for fault in faults:
        if fault.kind not in INTERRUPTING:
            continue
        for started_at, row in starts:
            card = fault.card is None or fault.card in row.card_indices
            if started_at > fault.at and (not fault.node or _on(fault.node, row)) and card:
                found.setdefault(fault.kind, []).append(started_at - fault.at)
                break
    return found
