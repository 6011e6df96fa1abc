"""Worker processes of a node, without Ray: no card waits for another's request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import patience
from scripted_worker import KindConfig
from test_card_process import ATTEMPT, Server, alive, close_server, eventually, open_server

from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, RankOutcome, WorkerInfo
from orchestrator.core.readings import Energy
from orchestrator.worker import card_process
from orchestrator.worker.card_process import CardProcess, Launch, Order
from orchestrator.worker.messages import (
    Ended,
    Halted,
    Listen,
    Listened,
    Request,
    Response,
    Run,
    Start,
    Started,
    Stop,
    Stopped,
)
from orchestrator.worker.node_workers import HALTED_LOOKS, NodeWorkers
from orchestrator.worker.outcome_bytes import unpacked


class Node:
    """The workers of a node, and all that they have told."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._changed = threading.Condition()
        self.told: list[Response] = []
        self.workers = NodeWorkers(self._tell, self._energy, self._readings)

    def _tell(self, response: Response) -> None:
        with self._changed:
            self.told.append(response)
            self._changed.notify_all()

    def _energy(self, index: int, start: float, end: float) -> Energy | None:
        return Energy(energy_j=float(index), duration_s=end - start, source="power")

    def _readings(self, index: int, start: float, end: float) -> dict[str, str]:
        return {"card": str(index), "seconds": f"{end - start:g}"}

    def do(self, *requests: Request) -> None:
        for request in requests:
            self.workers.do(request)

    def wait_for(self, kind: type, name: str) -> Response:
        """The first response of this kind from this worker."""
        deadline = time.monotonic() + patience(20)
        while True:
            with self._changed:
                for response in self.told:
                    if type(response) is kind and response.worker_id == name:
                        return response
                assert self._changed.wait(deadline - time.monotonic()), self.told

    def kinds(self, name: str) -> list[str]:
        """The kinds of a worker's responses, in order."""
        return [type(response).__name__ for response in self.told if response.worker_id == name]

    def start(self, name: str, run: str = "", start: str = "", idle: str = "") -> Start:
        return Start(
            Launch(
                name=name,
                server=self._server.path,
                factory="scripted_worker:TimedWorker",
                config={"name": name, "start": start, "run": run, "idle": idle},
                environments={"": {"CARD": "5"}},
                log=str(self._server.logs / f"{name}.log"),
            )
        )

    def run(
        self,
        name: str,
        attempt_id: str = "a-1",
        card_index: int | None = None,
        rendezvous: object = None,
        after: str = "",
    ) -> Run:
        order = Order(
            attempt_id=attempt_id,
            label="a job",
            kind="",
            rank=0,
            attempt=ATTEMPT.to_json(),
            rendezvous=rendezvous,
        )
        return Run(name, order, card_index, after)

    def pid(self, name: str) -> int:
        started = self.wait_for(Started, name)
        assert isinstance(started, Started) and isinstance(started.value, WorkerInfo)
        return started.value.pid


def outcome_of(response: Response) -> RankOutcome:
    assert isinstance(response, Ended) and response.outcome is not None
    outcome = response.outcome
    return unpacked(outcome) if isinstance(outcome, bytes) else outcome


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    server = open_server(tmp_path, "scripted_worker")
    yield Node(server)
    close_server(server)


def test_requests_to_a_worker_are_done_in_their_order(node: Node) -> None:
    """Written in one breath: a start and five attempts; nothing is heard after the stop."""
    node.do(node.start("w"), *(node.run("w", f"a-{number}") for number in range(5)))
    assert eventually(lambda: node.kinds("w") == ["Started", *["Ended"] * 5])
    node.do(Stop("w", "done"))
    node.wait_for(Stopped, "w")
    assert node.kinds("w") == ["Started", *["Ended"] * 5, "Stopped"]
    ended = [response for response in node.told if isinstance(response, Ended)]
    assert [response.attempt_id for response in ended] == [f"a-{number}" for number in range(5)]
    assert {outcome_of(response).state for response in ended} == {State.SUCCEEDED}


def test_a_busy_worker_is_stopped_while_another_goes_on(node: Node) -> None:
    """Neither its start nor its job keeps anything else of the node waiting."""
    node.do(node.start("slow", start="import time; time.sleep(600)"))
    node.do(node.start("busy", run="import time; time.sleep(600)"), node.run("busy"))
    node.do(node.start("quick", run="import time; time.sleep(1.5)"))
    node.wait_for(Started, "busy")
    node.wait_for(Started, "quick")
    node.do(node.run("quick"))
    assert eventually(lambda: "busy" in node.workers.progress())
    began = time.monotonic()
    node.do(Stop("busy", "no progress"), Stop("slow", "did not come up"))
    lost = outcome_of(node.wait_for(Ended, "busy"))
    node.wait_for(Stopped, "busy")
    node.wait_for(Stopped, "slow")
    assert time.monotonic() - began < patience(3)
    assert lost.state is State.LOST and lost.failure is not None
    assert lost.failure.message == "stopped: no progress"
    assert node.kinds("busy") == ["Started", "Ended", "Stopped"]
    assert node.kinds("slow") == ["Started", "Stopped"]
    assert outcome_of(node.wait_for(Ended, "quick")).state is State.SUCCEEDED
    node.do(Stop("quick", "done"))
    node.wait_for(Stopped, "quick")


def test_a_worker_stopped_in_the_breath_that_started_it_is_gone(node: Node) -> None:
    """However far its start is by then."""
    for number in range(5):
        name = f"hasty-{number}"
        node.do(node.start(name), Stop(name, "changed my mind"))
        node.wait_for(Stopped, name)
        assert node.kinds(name) == ["Started", "Stopped"]
        value = next(a.value for a in node.told if isinstance(a, Started) and a.worker_id == name)
        assert isinstance(value, Failure) or not alive(value.pid)


def test_what_comes_too_late_is_answered(node: Node) -> None:
    """For a worker that has died, or never was."""
    node.do(node.start("dying", run="os._exit(3)"), node.run("dying", "a-1"))
    died = node.wait_for(Ended, "dying")
    assert isinstance(died, Ended) and died.process_gone
    node.do(node.run("dying", "a-2"), Listen("nobody", "a-3", "here"), Stop("nobody", "late"))
    node.wait_for(Stopped, "nobody")
    late = [a for a in node.told if isinstance(a, Ended) and a.attempt_id == "a-2"]
    assert late == [Ended("dying", "a-2", None, True)]
    (refused,) = [a for a in node.told if isinstance(a, Listened)]
    assert isinstance(refused.rendezvous, Failure)
    assert refused.rendezvous.failure_class is FailureClass.CRASH


#: Writes down that it ran, and crashes, fails or succeeds as a file says.
_AS_TOLD = """
import pathlib, os, signal, time
log = pathlib.Path({log!r})
ran = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (ran + 1))
if ran + 1 == {at}:
    {what}
"""


@pytest.mark.parametrize(
    ("what", "gone"),
    [("os.kill(os.getpid(), signal.SIGKILL)", True), ("raise ValueError('no')", False)],
)
def test_what_is_behind_a_failure_never_begins(
    node: Node, tmp_path: Path, what: str, gone: bool
) -> None:
    """Of six attempts given in one breath the third fails or takes its process along: it alone
    failed, and those behind it are given back without having run. What is asked for without
    regard to them runs, if the process is there."""
    log = tmp_path / "ran"
    chain = ["", *(f"a-{number}" for number in range(5))]
    runs = [node.run("w", f"a-{number}", after=chain[number]) for number in range(6)]
    node.do(node.start("w", run=_AS_TOLD.format(log=str(log), at=3, what=what)), *runs)
    assert eventually(lambda: node.kinds("w") == ["Started", *["Ended"] * 6])
    first, second, third, *others = [each for each in node.told if isinstance(each, Ended)]
    assert {outcome_of(each).state for each in (first, second)} == {State.SUCCEEDED}
    assert outcome_of(third).state is State.FAILED and third.process_gone is gone
    assert [each.outcome for each in others] == [None] * 3
    assert len(log.read_text()) == 3
    node.do(node.run("w", "b-1", after="a-5"), node.run("w", "b-2"))
    assert eventually(lambda: node.kinds("w") == ["Started", *["Ended"] * 8])
    *_, behind, free = [each for each in node.told if isinstance(each, Ended)]
    assert behind.outcome is None
    assert free.outcome is None if gone else outcome_of(free).state is State.SUCCEEDED


class Feeding(Node):
    """Gives each worker one more attempt for each that ended by itself, as a driver does."""

    def _tell(self, response: Response) -> None:
        super()._tell(response)
        if isinstance(response, Ended) and isinstance(response.outcome, bytes):
            number = int(response.attempt_id.removeprefix("a-")) + 6
            name = response.worker_id
            self.do(self.run(name, f"a-{number}", after=f"a-{number - 1}"))


def test_what_a_process_answered_before_it_died_counts(tmp_path: Path) -> None:
    """It runs four of the attempts that it was given and dies of the fifth, all before anybody
    reads an answer, while others are sent to it: the fifth alone failed."""
    server = open_server(tmp_path, "scripted_worker")
    node, names = Feeding(server), [f"w-{number}" for number in range(5)]
    run = "self.ran = getattr(self, 'ran', 0) + 1\nif self.ran == 5: os.kill(os.getpid(), 9)"
    for name in names:
        runs = [node.run(name, f"a-{n}", after=f"a-{n - 1}" if n else "") for n in range(6)]
        node.do(node.start(name, run=run), *runs)
    for name in names:
        ended = ["Ended"] * 10  # six at first, and one more for each of the four
        assert eventually(lambda name=name, ended=ended: node.kinds(name) == ["Started", *ended])
        told = [each for each in node.told if isinstance(each, Ended) and each.worker_id == name]
        assert [each.attempt_id for each in told] == [f"a-{number}" for number in range(10)]
        assert [outcome_of(each).state for each in told[:4]] == [State.SUCCEEDED] * 4
        assert outcome_of(told[4]).state is State.FAILED
        assert [each.process_gone for each in told] == [False] * 4 + [True] * 6
        assert [each.outcome for each in told[5:]] == [None] * 5
    close_server(server)


def test_what_waits_behind_a_long_job_is_given_back_and_does_not_begin(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is in the process already or came while that was busy. The long job ends well, and
    the worker takes others. It keeps nothing for what it has and does not begin."""
    monkeypatch.setattr(card_process, "KEEP_S", 0.5)
    log, go_on = tmp_path / "ran", tmp_path / "go-on"
    wait = f"while not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.02)"
    run = _AS_TOLD.format(log=str(log), at=2, what=wait)
    seen = tmp_path / "idle"
    idle = f"import pathlib; pathlib.Path({str(seen)!r}).write_text('nothing follows')"
    node.do(node.start("w", run=f"{run}\npathlib.Path({str(seen)!r}).unlink(True)", idle=idle))
    node.do(node.run("w", "a-0"))
    node.do(*(node.run("w", f"a-{n}", after=f"a-{n - 1}") for n in range(1, 4)))
    assert eventually(lambda: log.exists() and len(log.read_text()) == 2)
    node.do(node.run("w", "a-4", after="a-3"))
    assert eventually(lambda: node.kinds("w") == ["Started", *["Ended"] * 4])
    go_on.touch()
    assert eventually(lambda: node.kinds("w") == ["Started", *["Ended"] * 5])
    assert eventually(seen.exists)
    node.do(
        node.run("w", "a-5", after="a-4"), node.run("w", "b-1"), node.run("w", "b-2", after="b-1")
    )
    assert eventually(lambda: node.kinds("w") == ["Started", *["Ended"] * 8])
    ended = [each for each in node.told if isinstance(each, Ended)]
    told = {each.attempt_id: each.outcome is not None for each in ended}
    ran = ["a-0", "a-1", "b-1", "b-2"]
    assert told == {name: name in ran for name in ("a-0", "a-2", "a-3", "a-4", "a-1", "a-5", *ran)}
    assert len(log.read_text()) == 4


def test_what_an_earlier_process_was_given_is_not_awaited_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose orders were given back is replaced, before it has said so, by one of another
    kind; behind a failure that one is heard."""
    monkeypatch.setattr(card_process, "KEEP_S", 0.1)
    server = open_server(tmp_path, "scripted_worker")
    name = "attempt.attempt_id"
    run = f"assert {name} != 'bad'\nif {name} == 'slow': time.sleep(0.5)"
    process = CardProcess(
        Launch(
            name="k",
            server=server.path,
            factory="scripted_worker:KindWorker",
            config=KindConfig(run=run),
            environments={"": {"MODE": "1"}, "other": {"MODE": "2"}},
            log=str(tmp_path / "log"),
        )
    )
    assert isinstance(process.start(), WorkerInfo)

    def order(name: str, kind: str) -> Order:
        attempt = replace(ATTEMPT, attempt_id=name).to_json()
        return Order(attempt_id=name, label=name, kind=kind, rank=0, attempt=attempt)

    given_back = list[bool]()
    behind = [order("b", ""), order("c", "")]
    assert process.run(order("slow", ""), behind, lambda: given_back.append(True)) is not None
    assert given_back
    assert process.run(order("ordinary", "other")) is not None
    bad, *others = (order(each, "other") for each in ("bad", "d", "e"))
    failed = process.run(bad, others)
    assert isinstance(failed, RankOutcome) and failed.state is State.FAILED
    assert [process.run(each) for each in others] == [None, None]
    process.stop("done")
    close_server(server)


def test_attempts_given_ahead_follow_whether_they_come_together_or_late(node: Node) -> None:
    """Some in one breath, one while its predecessor runs, one after that has ended."""
    node.do(node.start("w", run="import time; time.sleep(0.05)"))
    node.do(node.run("w", "a-0"), node.run("w", "a-1", after="a-0"))
    node.wait_for(Started, "w")
    node.do(node.run("w", "a-2", after="a-1"))
    assert eventually(lambda: len(node.kinds("w")) == 4)
    node.do(node.run("w", "a-3", after="a-2"), node.run("w", "a-9", after="a-8"))
    assert eventually(lambda: len(node.kinds("w")) == 6)
    ended = [each for each in node.told if isinstance(each, Ended)]
    assert [each.attempt_id for each in ended] == ["a-0", "a-1", "a-2", "a-3", "a-9"]
    assert [each.outcome is None for each in ended] == [False] * 4 + [True]


def test_what_a_card_took_is_read_where_it_is_asked_for(node: Node) -> None:
    """From the time that the outcome says; an emulated card's is not asked for."""
    node.do(node.start("w"), node.run("w", "a-1", card_index=7), node.run("w", "a-2"))
    assert eventually(lambda: node.kinds("w") == ["Started", "Ended", "Ended"])
    read, unread = (a for a in node.told if isinstance(a, Ended))
    assert read.energy == Energy(energy_j=7.0, duration_s=2.0, source="power")
    assert unread.energy is None
    assert read.readings == {"card": "7", "seconds": "2"} and unread.readings == {}
    node.do(Stop("w", "done"))
    node.wait_for(Stopped, "w")


def test_a_card_is_read_though_nobody_here_can_read_the_result(node: Node) -> None:
    """A workload has put a class of its own into it, which is for the driver to find; the worker
    goes on."""
    node.do(node.start("w", run="self.result = unreadable_result()"))
    node.do(node.run("w", "a-1", card_index=7), node.run("w", "a-2", card_index=7))
    assert eventually(lambda: node.kinds("w") == ["Started", "Ended", "Ended"])
    for each in node.told:
        if isinstance(each, Ended):
            assert isinstance(each.outcome, bytes)
            assert each.energy == Energy(energy_j=7.0, duration_s=2.0, source="power")


def test_a_halted_rank_is_told_and_a_silent_one_is_not(node: Node) -> None:
    """By the state of its process, seen so often in a row: a rank of a gang that a signal has
    stopped. One that holds the interpreter and says nothing, as while a graph is compiled, is left
    alone, and so is one that goes on in time, and a job on one card."""
    silent = "import ctypes; ctypes.PyDLL(None).sleep(600)"
    sleeps = "import time; time.sleep(600)"
    gang: dict[str, Any] = {"rendezvous": "somewhere"}
    for name, run, meeting in (
        ("silent", silent, gang),
        ("stopped", sleeps, gang),
        ("goes-on", sleeps, gang),
        ("alone", sleeps, {}),
    ):
        node.do(node.start(name, run=run), node.run(name, **meeting))
    assert eventually(lambda: len(node.workers.progress()) == 4)
    for name in ("stopped", "goes-on", "alone"):
        os.kill(node.pid(name), signal.SIGSTOP)
        assert eventually(partial(_stopped, node.pid(name)))
    for _ in range(HALTED_LOOKS - 1):
        node.workers.look()
    os.kill(node.pid("goes-on"), signal.SIGCONT)
    assert eventually(lambda: not _stopped(node.pid("goes-on")))
    assert not [response for response in node.told if isinstance(response, Halted)]
    for _ in range(3):
        node.workers.look()
    (halted,) = [response for response in node.told if isinstance(response, Halted)]
    assert (halted.worker_id, halted.attempt_id) == ("stopped", "a-1")
    assert "stopped by a signal" in halted.reason
    for name in ("silent", "stopped", "goes-on", "alone"):
        node.do(Stop(name, "done"))
        node.wait_for(Stopped, name)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
