"""Worker processes of a node and their spawner, without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import patience, until
from source_tree import ROOT
from test_process import ATTEMPT, Server, close_server, open_server

from orchestrator.core.job import State
from orchestrator.core.outcome import Failure, FailureClass, RankOutcome, WorkerInfo
from orchestrator.core.readings import Energy
from orchestrator.worker.node_workers import HALTED_LOOKS, NodeWorkers
from orchestrator.worker.orphans import processes
from orchestrator.worker.protocol import (
    Ended,
    Halted,
    Listen,
    Listened,
    Response,
    Run,
    Started,
    Stop,
    Stopped,
    WorkerRequest,
    unpickled,
)
from orchestrator.worker.spawn import OwnSpawner


class Sampler:
    def energy(self, index: int, start: float, end: float) -> Energy | None:
        return Energy(energy_j=float(index), duration_s=end - start, source="power")

    def readings(self, index: int, start: float, end: float) -> dict[str, str]:
        return {"card": str(index), "seconds": f"{end - start:g}"}


class Node:
    """The workers of a node, and all that they have told."""

    def __init__(self, server: Server) -> None:
        self.start = server.request
        self._changed = threading.Condition()
        self.responses: list[Response] = []
        self.workers = NodeWorkers(self._add)

    def _add(self, response: Response, _: Run | None) -> None:
        with self._changed:
            self.responses.append(response)
            self._changed.notify_all()

    def do(self, *requests: WorkerRequest) -> None:
        for request in requests:
            self.workers.do(request)

    def wait_for(self, kind: type, name: str) -> Response:
        deadline = time.monotonic() + patience(20)
        while True:
            with self._changed:
                for response in self.responses:
                    if type(response) is kind and response.worker_id == name:
                        return response
                assert self._changed.wait(deadline - time.monotonic()), self.responses

    def kinds(self, name: str) -> list[str]:
        return [
            type(response).__name__ for response in self.responses if response.worker_id == name
        ]

    def run(self, name: str, attempt_id: str = "a-1", rendezvous: object = None) -> Run:
        return Run(name, replace(ATTEMPT, attempt_id=attempt_id), 0, rendezvous)

    def pid(self, name: str) -> int:
        started = self.wait_for(Started, name)
        assert isinstance(started, Started) and isinstance(started.value, WorkerInfo)
        return started.value.pid


def outcome_of(response: Response) -> RankOutcome:
    assert isinstance(response, Ended) and response.outcome is not None
    outcome = response.outcome
    return unpickled(outcome) if isinstance(outcome, bytes) else outcome


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    opened = open_server(tmp_path_factory.mktemp("node"), "scripted_worker")
    yield opened
    close_server(opened)


@pytest.fixture
def node(server: Server) -> Iterator[Node]:
    node = Node(server)
    yield node
    node.workers.close("the test is over")


def test_requests_to_a_worker_are_done_in_their_order(node: Node) -> None:
    node.do(node.start("w"), *(node.run("w", f"a-{number}") for number in range(5)))
    assert until(lambda: node.kinds("w") == ["Started", *["Ended"] * 5], 10)
    node.do(Stop("w", "done"))
    node.wait_for(Stopped, "w")
    assert node.kinds("w") == ["Started", *["Ended"] * 5, "Stopped"]
    ended = [response for response in node.responses if isinstance(response, Ended)]
    assert [response.attempt_id for response in ended] == [f"a-{number}" for number in range(5)]
    assert {outcome_of(response).state for response in ended} == {State.SUCCEEDED}


def test_a_busy_worker_is_stopped_while_another_goes_on(node: Node) -> None:
    node.do(node.start("slow", start="import time; time.sleep(600)"))
    node.do(node.start("busy", run="import time; time.sleep(600)"), node.run("busy"))
    node.do(node.start("quick", run="import time; time.sleep(1.5)"))
    node.wait_for(Started, "busy")
    node.wait_for(Started, "quick")
    node.do(node.run("quick"))
    assert until(lambda: "busy" in node.workers.progress(), 10)
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


def test_what_comes_too_late_is_answered(node: Node) -> None:
    node.do(node.start("dying", run="os._exit(3)"), node.run("dying", "a-1"))
    died = node.wait_for(Ended, "dying")
    assert isinstance(died, Ended) and died.process_gone
    node.do(node.run("dying", "a-2"), Listen("nobody", "a-3", "here"), Stop("nobody", "late"))
    node.wait_for(Stopped, "nobody")
    late = [a for a in node.responses if isinstance(a, Ended) and a.attempt_id == "a-2"]
    assert late == [Ended("dying", "a-2", None, True)]
    (refused,) = [a for a in node.responses if isinstance(a, Listened)]
    assert isinstance(refused.rendezvous, Failure)
    assert refused.rendezvous.failure_class is FailureClass.CRASH


def test_what_a_card_took_is_read_at_the_time_that_the_outcome_says(node: Node) -> None:
    """Also where nobody here can read the result, since it holds a workload's own class."""
    node.workers.sampler = Sampler()  # type: ignore[assignment]
    node.do(node.start("w", run="self.result = result_of(part=WorkloadsOwn())"))
    node.do(node.run("w", "a-1"), node.run("w", "a-2"))
    assert until(lambda: node.kinds("w") == ["Started", "Ended", "Ended"], 10)
    index = ATTEMPT.cards[0].index
    for response in node.responses:
        if isinstance(response, Ended):
            assert isinstance(response.outcome, bytes)
            energy = Energy(energy_j=float(index), duration_s=2.0, source="power")
            assert response.energy == energy
            assert response.readings == {"card": str(index), "seconds": "2"}
    node.do(Stop("w", "done"))
    node.wait_for(Stopped, "w")


def test_a_halted_rank_is_told_and_a_silent_one_is_not(node: Node) -> None:
    """One that holds the interpreter, as while a graph is compiled, is left alone, and so are one
    that goes on in time and a job on one card."""
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
    assert until(lambda: len(node.workers.progress()) == 4, 10)
    for name in ("stopped", "goes-on", "alone"):
        os.kill(node.pid(name), signal.SIGSTOP)
        assert until(partial(_stopped, node.pid(name)), 10)
    for _ in range(HALTED_LOOKS - 1):
        node.workers.look()
    os.kill(node.pid("goes-on"), signal.SIGCONT)
    assert until(lambda: not _stopped(node.pid("goes-on")), 10)
    assert not [response for response in node.responses if isinstance(response, Halted)]
    for _ in range(3):
        node.workers.look()
    (halted,) = [response for response in node.responses if isinstance(response, Halted)]
    assert (halted.worker_id, halted.attempt_id) == ("stopped", "a-1")
    assert "stopped by a signal" in halted.reason
    for name in ("silent", "stopped", "goes-on", "alone"):
        node.do(Stop(name, "done"))
        node.wait_for(Stopped, name)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# ---------------------------------------------------------------- the spawner of a host

_LOADS_FOR_EVER = """
import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"])
place = pathlib.Path(os.environ["PIDS"])
(place / "new").write_text(f"{os.getpid()} {child.pid}")
(place / "new").rename(place / str(os.getppid()))
time.sleep(600)
"""


@pytest.fixture
def loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[OwnSpawner, list[int]]]:
    (tmp_path / "loads_for_ever.py").write_text(_LOADS_FOR_EVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PIDS", str(tmp_path))
    spawner = OwnSpawner(["loads_for_ever"], threads=1, log=tmp_path / "log")
    written = tmp_path / str(spawner.reaper.pid)
    assert until(written.exists, 20), (tmp_path / "log").read_text()
    pids = [int(pid) for pid in written.read_text().split()]
    yield spawner, pids
    for pid in processes().keys() & set(pids):
        os.kill(pid, signal.SIGKILL)
    spawner.close()


def test_a_spawner_can_be_ended_while_it_imports(loading: tuple[OwnSpawner, list[int]]) -> None:
    spawner, pids = loading
    spawner.close()
    assert spawner.reaper.returncode == 128 + signal.SIGKILL  # of the spawner
    assert not processes().keys() & set(pids)
    assert not Path(spawner.shared.path).parent.exists()


def test_a_spawner_that_imports_ends_with_its_reaper(
    loading: tuple[OwnSpawner, list[int]],
) -> None:
    spawner, (pid, _) = loading
    spawner.reaper.kill()
    assert until(lambda: pid not in processes(), 5)


_DRIVER = """
import pathlib, signal, sys, time
from orchestrator.worker.spawn import OwnSpawner, wait_for_end
signal.signal(signal.SIGINT, lambda *_: None)
log = pathlib.Path(sys.argv[1], "logs", "spawner.log")
own = OwnSpawner((), threads=1, log=log)
while "serving" not in log.read_text():
    time.sleep(0.01)
print(own.shared.path, flush=True)
sys.stdin.readline()
time.sleep(0.2)
print(own.shared.serves(1), flush=True)
own.release()
wait_for_end(own.shared.path)
print("released", own.reaper.wait(20), flush=True)
own.close()
"""


@pytest.mark.slow
def test_what_a_terminal_sends_its_programs_is_not_for_the_spawner(tmp_path: Path) -> None:
    """Ctrl-C asks a driver to let its jobs end; they would end with their spawner."""
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group, as a shell makes one
    )
    assert driver.stdin is not None and driver.stdout is not None
    with driver:
        path = Path(driver.stdout.readline().strip())
        os.killpg(driver.pid, signal.SIGINT)
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "True\n"
        assert driver.stdout.readline() == "released 0\n"
    assert driver.returncode == 0 and not path.parent.exists()


@pytest.mark.slow
def test_workers_are_forked_however_many_threads_they_may_have(tmp_path: Path) -> None:
    """NumPy's OpenBLAS starts a thread for each of OpenMP's but the first, which would rule out
    forking."""
    spawner = OwnSpawner(["numpy"], threads=4, log=tmp_path / "log")
    try:
        server = Server(spawner=spawner, logs=tmp_path)
        info = server.process(start="import sys; assert 'numpy' in sys.modules").start()
        assert isinstance(info, WorkerInfo), (tmp_path / "1.log").read_text()
    finally:
        spawner.close()
