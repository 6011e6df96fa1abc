"""Invariants of a run, checked at every moment from events and commands alone.

The checker keeps state of its own, independent of the schedule's; it costs a few dictionary
look-ups a command, so it stays on in simulations of a million events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from orchestrator.core import events
from orchestrator.core.job import Job, State
from orchestrator.core.topology import Card, CardSet, Node, legal_groups

_LATE_S = 0.01  # timers come due a moment after their time


class InvariantViolated(AssertionError):
    """Something happened that must never happen."""


@dataclass(slots=True, eq=False)
class _Process:
    card: Card
    rank: int
    local_rank: int
    world_size: int
    ready: bool = False
    stopping: bool = False
    told_at: float = inf  # to end
    attempts: int = 0
    attempt_id: str = ""  # of what it runs
    replicate: int = 0  # of what it has run


@dataclass(slots=True)
class Invariants:
    """Feed it each event before the schedule sees it, and each command as it is given."""

    max_attempts: int | None = None  # of a job
    judged: bool = False  # flagged rows are measured again
    searched: bool = False  # winners are measured again
    work_until: float = inf  # nothing begins later, and nothing that is known to last longer
    over_by: float = inf  # the run is
    follow_clock: bool = True  # both are times of day, and move when that is set
    stop_patience_s: float = inf  # longest wait for a stopped process
    lasts_s: Callable[[Job], float] | None = None  # what is known of durations; None: it changes
    now: float = 0.0
    needs: Mapping[str, Collection[str]] = field(default_factory=dict)  # that run in this run
    nodes: dict[str, Node] = field(default_factory=dict)
    processes: dict[str, _Process] = field(default_factory=dict)
    running: dict[str, events.RunAttempt] = field(default_factory=dict)  # by attempt id
    final: dict[str, events.RecordRow] = field(default_factory=dict)  # by job id
    attempts: dict[str, int] = field(default_factory=dict)  # by job id
    repeats: Counter[str] = field(default_factory=Counter)  # that began, by job id
    finished: bool = False
    checked: int = 0
    _on_card: dict[Card, str] = field(default_factory=dict)  # worker id
    _job_running: dict[str, str] = field(default_factory=dict)  # job id -> attempt id
    _unrecorded: dict[Card, str] = field(default_factory=dict)  # ended attempt without a row
    _issued: set[str] = field(default_factory=set)

    def observe(self, event: events.Event) -> None:
        """Update the state by an event."""
        self.now = max(self.now, event.at)
        if isinstance(event, events.AttemptEnded):
            command = self.running.get(event.outcome.attempt_id)
            if command is not None:
                self._give_up(event.outcome.attempt_id)
                here = (card for card in command.attempt.cards if card.node_id in self.nodes)
                self._unrecorded |= dict.fromkeys(here, event.outcome.attempt_id)
        elif isinstance(event, events.WorkerReady):
            if event.worker_id in self.processes:
                self.processes[event.worker_id].ready = True
        elif isinstance(event, events.WorkerStopped):
            self._gone(event.worker_id)
        elif isinstance(event, events.NodeJoined):
            self.nodes[event.node.node_id] = event.node
        elif isinstance(event, events.NodeLeft):
            self.nodes.pop(event.node_id, None)
            on_node = [
                worker_id
                for worker_id, process in self.processes.items()
                if process.card.node_id == event.node_id
            ]
            for worker_id in on_node:
                self._gone(worker_id)
        elif isinstance(event, events.ClockSet):
            moved_s = event.by_s if self.follow_clock else 0.0
            moved_s = moved_s if event.by_s else event.ahead_s  # said for the first time
            self.work_until -= moved_s
            self.over_by = max(self.over_by - moved_s, self.now)

    def check(self, commands: Iterable[events.Command]) -> None:
        """Raise ``InvariantViolated`` if one of these commands, in this order, breaks a rule."""
        for command in commands:
            self.checked += 1
            if not isinstance(command, events.Wake):
                _must(self.now <= self.over_by + _LATE_S, "goes on after its time", command)
            _must(not self.finished, "a command after RunFinished", command)
            if isinstance(command, events.StartWorker):
                self._start(command)
            elif isinstance(command, events.StopWorker):
                process = self.processes.get(command.worker_id)
                if process is None:
                    raise InvariantViolated(f"unknown worker is stopped: {command}")
                _must(not process.stopping, "worker is stopped twice", command)
                process.stopping = True
                process.told_at = self.now
            elif isinstance(command, events.RunAttempt):
                self._run(command)
            elif isinstance(command, events.RecordRow):
                self._record(command)
            elif isinstance(command, events.RunFinished):
                left = [name for name, p in self.processes.items() if not self._given_up(p)]
                _must(not left, f"finished with workers left: {left}")
                _must(not self.running, f"finished while running: {list(self.running)}")
                self.finished = True

    def _given_up(self, process: _Process) -> bool:
        waited = self.now >= process.told_at + self.stop_patience_s or self.now >= self.over_by
        return process.stopping and waited

    def check_end(self, job_ids: Iterable[str]) -> None:
        """Check the end of a run: it has ended, and every job has its final row."""
        _must(self.finished, "the run did not finish")
        missing = [job_id for job_id in job_ids if job_id not in self.final]
        _must(not missing, f"{len(missing)} jobs were lost, such as {missing[:3]}")

    def _start(self, command: events.StartWorker) -> None:
        card = command.card
        _must(self.now < self.work_until, "a worker is started after the time for work", command)
        node = self.nodes.get(card.node_id)
        known = node is not None and card.index in node.card_indices
        _must(known, "no such card", command)
        _must(card not in self._on_card, "the card has a worker already", command)
        _must(command.worker_id not in self.processes, "worker id used twice", command)
        self._must_be_recorded(card)
        self._on_card[card] = command.worker_id
        self.processes[command.worker_id] = _Process(
            card, command.rank, command.local_rank, command.world_size
        )

    def _run(self, command: events.RunAttempt) -> None:
        attempt = command.attempt
        job = attempt.job
        if attempt.job_id in self.final:
            self.repeats[attempt.job_id] += 1
            succeeded = self.final[attempt.job_id].state is State.SUCCEEDED
            most = self.judged * job.measure.repeat_flagged + self.searched
            few = self.repeats[attempt.job_id] <= most
            _must(succeeded and few, "runs after its final row", attempt)
        _must(self.now < self.work_until, "runs after the time for work", attempt)
        if self.lasts_s is not None and attempt.job_id == job.job_id:  # no search
            ends = self.now + self.lasts_s(job)
            _must(ends <= self.work_until + _LATE_S, "cannot end in time", (ends, attempt))
        _must(attempt.job_id not in self._job_running, "runs twice at once", attempt)
        for needed in self.needs.get(attempt.job_id, ()):
            row = self.final.get(needed)
            succeeded = row is not None and row.state is State.SUCCEEDED
            _must(succeeded, f"runs before {needed}", attempt)
        _must(attempt.attempt_id not in self._issued, "attempt id used twice", attempt)
        _must(len(command.worker_ids) == len(attempt.cards) == job.cards, "width", attempt)
        _must(is_legal(attempt.cards, self.nodes), "illegal card set", attempt)
        for rank, worker_id in enumerate(command.worker_ids):
            process = self.processes.get(worker_id)
            if process is None or not process.ready or process.stopping:
                raise InvariantViolated(f"worker {worker_id} is not ready: {attempt}")
            _must(process.card == attempt.cards[rank], "a worker is on another card", command)
            _must(not process.attempt_id, "a worker is busy", command)
            _must(not (job.alone and process.attempts), "a process is not fresh", command)
            other = process.replicate not in (0, job.replicate)
            _must(not other, "a process runs two replicates", command)
            process.replicate = job.replicate
            here = self.nodes[process.card.node_id].server_id
            earlier = (self.nodes[card.node_id] for card in attempt.cards[:rank])
            local = sum(node.server_id == here for node in earlier)
            placed = (process.rank, process.local_rank, process.world_size)
            _must(placed == (rank, local, job.cards), "wrong rank or world size", (placed, command))
            self._must_be_recorded(process.card)
            process.attempts += 1
            process.attempt_id = attempt.attempt_id
        self.running[attempt.attempt_id] = command
        self._job_running[attempt.job_id] = attempt.attempt_id
        self._issued.add(attempt.attempt_id)
        count = self.attempts[attempt.job_id] = self.attempts.get(attempt.job_id, 0) + 1
        if self.max_attempts is not None:
            _must(count <= self.max_attempts, f"attempt {count} of a job", attempt)

    def _record(self, row: events.RecordRow) -> None:
        job_id = row.job.job_id
        if row.attempt is not None:
            for card in row.attempt.cards:
                if self._unrecorded.get(card) == row.attempt.attempt_id:
                    del self._unrecorded[card]
            if row.attempt.attempt_id in self.running:
                self._give_up(row.attempt.attempt_id)
        if row.final:
            again = self.judged or self.searched
            repeat = again and row.repeat and row.state is State.SUCCEEDED
            _must(repeat or job_id not in self.final, "second final row", row)
            _must(row.state.terminal, f"final row in state {row.state}", row)
            _must(job_id not in self._job_running, "final row while it runs", row)
            self.final[job_id] = row

    def _give_up(self, attempt_id: str) -> None:
        command = self.running.pop(attempt_id)
        self._job_running.pop(command.attempt.job_id, None)
        for worker_id in command.worker_ids:
            process = self.processes.get(worker_id)
            if process is not None and process.attempt_id == attempt_id:
                process.attempt_id = ""

    def _gone(self, worker_id: str) -> None:
        process = self.processes.pop(worker_id, None)
        if process is not None:
            del self._on_card[process.card]
            if process.card.node_id not in self.nodes:
                self._unrecorded.pop(process.card, None)

    def _must_be_recorded(self, card: Card) -> None:
        attempt_id = self._unrecorded.get(card)
        _must(attempt_id is None, "a card is used again before the row of", attempt_id)


def is_legal(cards: CardSet, nodes: Mapping[str, Node]) -> bool:
    """Return whether these cards are a legal group of one server, or whole servers."""
    if any(card.node_id not in nodes for card in cards):
        return False
    by_server: dict[str, list[int]] = {}
    size_of: dict[str, int] = {}
    for card in cards:
        node = nodes[card.node_id]  # perhaps one of several parts of the server
        by_server.setdefault(node.server_id, []).append(card.index)
        size_of[node.server_id] = max(node.server_cards, size_of.get(node.server_id, 0))
    sizes = set(size_of.values())
    if len(by_server) == 1:
        [indices], [size] = by_server.values(), sizes
        groups = legal_groups(cards[0].accelerator, len(indices), size)
        return tuple(sorted(indices)) in groups
    return len(sizes) == 1 and all(
        sorted(indices) == list(range(*sizes)) for indices in by_server.values()
    )


def _must(holds: bool, message: str, about: object = None) -> None:
    if not holds:
        raise InvariantViolated(f"{message}: {about}")
