"""Worker processes under their server, without Ray: how they start, die and are cleaned up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from core_cases import a_job
from patience import alive, patience, until
from scripted_worker import Script
from small_disks import fill, small_disk
from wheels import make_wheel, use_only

from orchestrator.core.job import Accelerator, State
from orchestrator.core.outcome import Attempt, Failure, FailureClass, RankOutcome, WorkerInfo
from orchestrator.core.topology import Card
from orchestrator.worker import process as process_module
from orchestrator.worker.process import WorkerProcess
from orchestrator.worker.protocol import Run, Start, unpickled
from orchestrator.worker.spawn import OwnSpawner, SpawnedProcess, wait_for_end

JOB = a_job()
ATTEMPT = Attempt(
    attempt_id="a-1",
    job_id=JOB.job_id,
    number=1,
    job=JOB,
    cards=(Card(node_id="n", index=0, accelerator=Accelerator.HPU),),
)


def ran(
    process: WorkerProcess, attempt: Attempt = ATTEMPT, rank: int = 0, rendezvous: Any = None
) -> RankOutcome:
    outcome = process.run(Run("w", attempt, rank, rendezvous))
    return unpickled(outcome) if isinstance(outcome, bytes) else outcome


@dataclass
class Server:
    """A running spawner."""

    spawner: OwnSpawner
    logs: Path
    processes: list[WorkerProcess] = field(default_factory=list)

    @property
    def path(self) -> str:
        return self.spawner.shared.path

    @property
    def reaper(self) -> int:
        return self.spawner.reaper.pid

    @property
    def pid(self) -> int:
        children = Path(f"/proc/{self.reaper}/task/{self.reaper}/children")
        assert until(lambda: children.read_text() != "", 10)
        return int(children.read_text().split()[0])

    def request(self, name: str, log: str = "", **script: str) -> Start:
        """The request for a worker that runs this script."""
        return Start(
            worker_id=name,
            server=self.path,
            factory="scripted_worker:ScriptedWorker",
            config=Script(name=name, **script),
            environments={"": {"CARD": "5"}},
            log=str(self.logs / f"{log or name}.log"),
        )

    def process(self, name: str = "w", **script: str) -> WorkerProcess:
        request = self.request(name, str(len(self.processes) + 1), **script)
        self.processes.append(WorkerProcess(request))
        return self.processes[-1]


def open_server(tmp_path: Path, *preload: str) -> Server:
    spawner = OwnSpawner(preload, threads=1, log=tmp_path / "spawner.log")
    return Server(spawner=spawner, logs=tmp_path)


def close_server(server: Server) -> None:
    directory = Path(server.path).parent
    server.spawner.close()
    assert server.spawner.reaper.returncode == 0
    assert not directory.exists()


@pytest.fixture(scope="module")
def spawners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    opened = {
        kind: open_server(tmp_path_factory.mktemp(kind), *preload)
        for kind, preload in (("fresh", ()), ("forked", ("scripted_worker",)))
    }
    yield opened
    for server in opened.values():
        close_server(server)


@pytest.fixture(params=["fresh", "forked"])
def server(
    request: pytest.FixtureRequest, spawners: dict[str, Server], tmp_path: Path
) -> Iterator[Server]:
    yield from _of_test(spawners[request.param], tmp_path)


@pytest.fixture
def fresh(spawners: dict[str, Server], tmp_path: Path) -> Iterator[Server]:
    yield from _of_test(spawners["fresh"], tmp_path)


def _of_test(server: Server, tmp_path: Path) -> Iterator[Server]:
    own = replace(server, logs=tmp_path, processes=[])
    yield own
    for process in own.processes:
        process.stop("the test is over")


def info_of(process: WorkerProcess) -> WorkerInfo:
    info = process.start()
    assert isinstance(info, WorkerInfo), info
    return info


def in_background(process: WorkerProcess) -> Future[RankOutcome]:
    return ThreadPoolExecutor(1).submit(ran, process)


def failure_of(process: WorkerProcess) -> Failure:
    """Start a process and run a rank that fails."""
    info_of(process)
    failure = ran(process).failure
    assert failure is not None
    return failure


def test_a_worker_has_its_environment_and_runs_attempts(server: Server) -> None:
    process = server.process()
    info = info_of(process)
    assert info.visible_cards == "5"
    assert info.versions["parent"] == str(server.pid)
    for rank in (0, 1):
        outcome = ran(process, rank=rank)
        assert (outcome.state, outcome.rank) == (State.SUCCEEDED, rank)
    process.stop("done")
    assert not alive(info.pid)


@pytest.mark.slow
def test_a_job_with_software_of_its_own_gets_an_interpreter_with_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spawner that forks does not fork these: it has imported the node's own packages."""
    make_wheel(tmp_path / "wheels", "planted", "1.5", "VALUE = 'new'")
    use_only(tmp_path / "wheels", tmp_path / "cache", monkeypatch)
    process = server.process(
        run="import planted; from orchestrator.worker.environment import versions\n"
        "self.result = result_of(value=planted.VALUE, version=versions()['planted'])"
    )
    first = info_of(process).pid
    known, missing = (
        replace(ATTEMPT, job=replace(JOB, parameters=(("software", f"planted=={version}"),)))
        for version in ("1.5", "1.6")
    )
    failure = ran(process, missing).failure
    assert failure is not None and failure.failure_class is FailureClass.BAD_CONFIGURATION
    assert process.pid == first  # the process is not to blame
    result = ran(process, known).result
    assert result is not None and result.details == {"value": "new", "version": "1.5"}
    assert process.pid != first
    process.stop("done")


@pytest.mark.slow
def test_a_job_gets_the_kind_of_process_that_it_needs(fresh: Server) -> None:
    ours = replace(ATTEMPT, job=replace(JOB, engine="optimum-habana"))
    kinds = {"": {"MODE": "eager"}, "optimum-habana/lazy": {"MODE": "lazy"}}
    said = (
        "self.result = result_of(pid=os.getpid(), kind=self.config.kind, mode=os.environ['MODE'])"
    )
    process = WorkerProcess(replace(fresh.request("k", run=said), environments=kinds))
    first = info_of(process).pid
    results = [ran(process, attempt).result for attempt in (ATTEMPT, ours, ours, ATTEMPT)]
    details = [result.details for result in results if result is not None]
    assert [(each["kind"], each["mode"]) for each in details] == [
        ("", "eager"),
        ("optimum-habana/lazy", "lazy"),
        ("optimum-habana/lazy", "lazy"),
        ("", "eager"),
    ]
    pids = [int(each["pid"]) for each in details]
    assert pids[0] == first and pids[1] == pids[2] and len(set(pids)) == 3
    assert not alive(pids[1]) and not process.gone
    process.stop("done")
    assert process.gone and not alive(pids[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import ctypes; print('before', flush=True); ctypes.string_at(0)", "SIGSEGV"),
        ("import os; print('before', flush=True); os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; print('before', flush=True); os._exit(17)", "exited with 17"),
        ("import os; print('before', flush=True); os.abort()", "SIGABRT"),
    ],
)
def test_every_sudden_death_has_its_cause_in_the_row(
    fresh: Server, source: str, words: str
) -> None:
    process = fresh.process(run=source)
    info = info_of(process)
    outcome = ran(process)
    assert outcome.state is State.FAILED and outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.CRASH
    assert words in outcome.failure.message and JOB.label in outcome.failure.message
    assert "before" in outcome.failure.tail
    assert outcome.failure.log.endswith("1.log")
    assert process.gone and outcome.worker == info


@pytest.mark.slow
def test_no_secret_gets_into_a_row_or_a_log(fresh: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hf_secret_0123456789")
    secret = "import os; secret = os.environ['HUB_TOKEN']; "
    failure = failure_of(fresh.process(run=secret + "print('has', secret); os._exit(9)"))
    assert "hf_secret" not in repr(failure)
    refused = fresh.process(start=secret + "raise ValueError('refused: ' + secret)").start()
    assert isinstance(refused, Failure)
    log = Path(refused.log.partition(":")[2]).read_text()
    assert "refused: <HUB_TOKEN>" in log and "hf_secret" not in log
    native = secret + "os.write(2, secret.encode() + b' leaks'); os._exit(9)"
    assert failure_of(fresh.process(run=native)).tail.endswith("<HUB_TOKEN> leaks")


PRINTING = """\
import os, subprocess, sys, warnings
for number in range(3000):
    print("a job that prints much", number)
    print("and complains", number, file=sys.stderr, flush=True)
os.system("echo and so does what it starts; echo twice >&2")
warnings.warn("a warning")
"""


@pytest.mark.slow
def test_a_job_that_prints_on_a_full_disk_keeps_its_outcome(fresh: Server, tmp_path: Path) -> None:
    """Its log has no room in its midst, or from its beginning, when it cannot even be made."""
    with small_disk(tmp_path / "small", 1 << 16) as disk:
        fresh.logs = disk
        process = fresh.process(run=PRINTING)  # fills what there is itself
        info_of(process)
        assert ran(process).state is State.SUCCEEDED
        full_from_the_start = fresh.process(run=PRINTING, name="w2")
        ballast = fill(disk)
        info_of(full_from_the_start)
        assert ran(full_from_the_start).state is State.SUCCEEDED
        ballast.unlink()
        (disk / "2.log").unlink(missing_ok=True)
        with (disk / "1.log").open("r+") as log:
            log.truncate(1 << 14)
        assert ran(process).state is State.SUCCEEDED  # and it is the same process
        said = (disk / "1.log").read_text()
        assert said.count("bytes of output lost") >= 1 and "No space left" in said
        process.stop("done")
        full_from_the_start.stop("done")


#: By attempt: what a job does to its output.
OUTPUTS = {
    "closed files": "os.close(1); os.close(2); print(1, flush=True); print(2, file=sys.stderr)",
    "closed streams": "sys.stdout.close(); sys.stderr.close()",
    "no streams": "sys.stdout = None; sys.stderr = None",
    "a closed buffer": "sys.stdout = io.StringIO(); sys.stdout.close()",
    "a full device": "sys.stdout = open('/dev/full', 'w'); print('lost')",
    "no end": "print('x' * 10**5, end=''); print('\\udcff', end=''); raise SystemError('said')",
    "none": "print('the next job', flush=True); os.fstat(1)",
}


@pytest.mark.slow
def test_a_job_may_do_to_its_output_what_it_likes(server: Server) -> None:
    process = server.process(run=f"import io, sys; exec({OUTPUTS!r}[attempt.attempt_id])")
    info_of(process)
    for number, name in enumerate(OUTPUTS, 1):
        outcome = ran(process, replace(ATTEMPT, attempt_id=name))
        if name == "no end":
            assert outcome.failure is not None and outcome.failure.message == "said"
        else:
            assert outcome.state is State.SUCCEEDED, (name, outcome)
        after = ran(process, replace(ATTEMPT, attempt_id="none"))
        assert after.state is State.SUCCEEDED, (name, after)
        assert (server.logs / "1.log").read_text().count("the next job") >= number, name
    process.stop("done")


@pytest.mark.slow
def test_a_planted_link_at_a_log_s_path_is_not_followed(fresh: Server, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("what belongs to somebody else\n")
    (fresh.logs / "1.log").symlink_to(target)
    (fresh.logs / "2.log").symlink_to(tmp_path / "not there")
    os.mkfifo(fresh.logs / "3.log")
    for _ in range(3):
        failure = failure_of(fresh.process(run="print('gone', flush=True); os._exit(9)"))
        assert "exited with 9" in failure.message and not failure.tail
    assert target.read_text() == "what belongs to somebody else\n"
    assert not (tmp_path / "not there").exists()


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_gone_and_says_why(fresh: Server) -> None:
    process = fresh.process(start="raise ValueError('no such card')")
    failure = process.start()
    assert isinstance(failure, Failure) and failure.message == "no such card"
    assert process.gone
    dying = fresh.process(start="import os; os._exit(3)")
    failure = dying.start()
    assert isinstance(failure, Failure) and "exited with 3 during start-up" in failure.message
    assert dying.gone


def test_a_worker_that_answers_before_its_kill_arrives_is_gone_all_the_same(
    spawners: dict[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while its process was being asked for."""
    process = spawners["forked"].process()
    pids = []

    class Late(SpawnedProcess):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            process.stop("changed my mind")  # there is nothing to kill yet
            super().__init__(*arguments, **named)
            pids.append(self.pid)

        def kill(self) -> None:
            threading.Timer(0.5, super().kill).start()

    monkeypatch.setattr(process_module, "SpawnedProcess", Late)
    failure = process.start()
    assert isinstance(failure, Failure) and failure.message == "stopped: changed my mind"
    assert process.gone and not any(map(alive, pids))


def test_a_failed_rendezvous_fails_the_rank_and_leaves_the_worker(fresh: Server) -> None:
    process = fresh.process()
    info_of(process)
    rendezvous = process.listen("nowhere")
    outcome = ran(process, rendezvous=rendezvous)
    assert outcome.state is State.FAILED and outcome.failure == rendezvous
    assert not process.gone
    process.stop("done")


@pytest.mark.slow
def test_a_stuck_worker_is_stopped_with_its_children(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "child"
    source = (
        "import ctypes, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(0.4)\n"
        "ctypes.PyDLL(None).sleep(600)\n"
    )
    process = server.process(run=source)
    info = info_of(process)
    running = in_background(process)
    assert until(lambda: (p := process.progress) is not None and p.phase == "warmup", 10)
    assert until(lambda: file.exists() and file.read_text() != "", 10)
    child = int(file.read_text())
    time.sleep(0.6)  # into the held lock
    started = time.monotonic()
    process.stop("no progress")
    assert time.monotonic() - started < patience(3)
    assert not alive(info.pid) and not alive(child)
    outcome = running.result(patience(5))
    assert outcome.state is State.LOST and outcome.failure is not None
    assert outcome.failure.message == "stopped: no progress"


#: Ignores what it can, and starts: a child in its own session with a child of its own, and a daemon
#: (its parent ends at once). Their process ids go into a file.
_STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
nested = (
    "import subprocess, sys, os, time;"
    "c = subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True);"
    "print(os.getpid(), c.pid, flush=True); time.sleep(int(sys.argv[2]))"
)
pids = []
for seconds in ("600", "0"):
    child = subprocess.Popen(
        [sys.executable, "-c", nested, sleeper, seconds],
        stdout=subprocess.PIPE, start_new_session=True, text=True,
    )
    pids += map(int, child.stdout.readline().split())
child.wait()
open(FILE + "~", "w").write(" ".join(map(str, pids)))
os.rename(FILE + "~", FILE)
"""


def stubborn(file: Path, then: str) -> str:
    return f"FILE = {str(file)!r}\n{_STUBBORN}\n{then}\n"


def pids_in(file: Path) -> list[int]:
    """The processes of a stubborn worker; one of the four has ended already."""
    assert until(file.exists, 60)
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 4 and sum(map(alive, pids)) == 3
    return pids


@pytest.mark.slow
def test_descendants_of_a_worker_are_ended_with_it_and_those_of_another_stay(
    server: Server, tmp_path: Path
) -> None:
    """Whoever ignores signals, leaves the process group or loses its parent."""
    other = server.process(name="other", run=stubborn(tmp_path / "others", "time.sleep(600)"))
    other_pid = info_of(other).pid
    running = in_background(other)
    others = pids_in(tmp_path / "others")
    process = server.process(run=stubborn(tmp_path / "pids", "os._exit(3)"))
    assert "exited with 3" in failure_of(process).message
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert process.gone and not any(map(alive, pids))
    assert alive(other_pid) and sum(map(alive, others)) == 3
    other.stop("done")
    assert other.gone and not any(map(alive, [other_pid, *others]))
    running.result(patience(5))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "kill the spawner", "kill the reaper"])
def test_everything_ends_with_a_spawner_however_it_ends(end: str, tmp_path: Path) -> None:
    """Also what workers have detached; agents that use it learn of the end when all are gone."""
    opened = open_server(tmp_path)
    shared = opened.spawner.shared
    assert shared.serves(1) and not shared.serves(2)
    process = opened.process(run=stubborn(tmp_path / "pids", "time.sleep(600)"))
    pid = info_of(process).pid
    running = in_background(process)
    pids = [pid, *pids_in(tmp_path / "pids")]
    if end == "close":
        close_server(opened)
    else:
        os.kill(opened.pid if "spawner" in end else opened.reaper, signal.SIGKILL)
        wait_for_end(opened.path)
    assert not any(map(alive, pids))
    outcome = running.result(patience(10))
    assert outcome.state is State.LOST and outcome.failure is not None
    assert outcome.failure.failure_class is FailureClass.NODE_LOST
    assert isinstance(opened.process().start(), Failure) and not shared.serves(1)
    opened.spawner.close()


@pytest.mark.slow
def test_a_worker_ends_with_its_client(fresh: Server) -> None:
    mine = info_of(fresh.process(run="import time; time.sleep(600)")).pid
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, fresh.path, str(fresh.logs)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    )
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    assert alive(pid)
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    assert until(lambda: not alive(pid), 10)
    assert alive(mine)


_CLIENT = """
import sys, time
from orchestrator.worker.process import WorkerProcess
from orchestrator.worker.protocol import Start
from scripted_worker import Script
process = WorkerProcess(Start(worker_id="orphan", server=sys.argv[1], environments={"": {}},
    factory="scripted_worker:ScriptedWorker", config=Script(),
    log=sys.argv[2] + "/orphan.log"))
print(process.start().pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_forked_workers_have_what_was_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('libcudart.so.11: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    forked = open_server(
        tmp_path, "broken_package", "no_such_package", "json", "orchestrator.core.outcome"
    )
    first, second = forked.process(name="1"), forked.process(name="2")
    pid = info_of(first).pid
    assert pid != info_of(second).pid
    command = Path(f"/proc/{pid}/cmdline").read_text()
    assert "orchestrator.worker.spawn" in command
    close_server(forked)
    log = (tmp_path / "spawner.log").read_text()
    assert "cannot preload broken_package: libcudart.so.11: no such file" in log
    fresh = open_server(tmp_path)
    process = fresh.process()
    info = info_of(process)
    assert "orchestrator.worker.main" in Path(f"/proc/{info.pid}/cmdline").read_text()
    close_server(fresh)
    assert not alive(info.pid)


def _leave(members: Path, parent: Path) -> bool:
    for pid in members.read_text().split():
        with contextlib.suppress(OSError):
            parent.write_text(pid)
    return not members.read_text()


#: More than ``small_cgroup`` holds.
TOO_MUCH = "[bytearray(b'x' * 2**20) for _ in range(512)]"


@pytest.fixture
def small_cgroup() -> Iterator[str]:
    """A control group that holds 64 MiB; its file of processes. Who is in it leaves it in the
    end."""
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / f"ngt-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(64 * 2**20))
        except OSError:
            group.rmdir()
            continue
        members = group / "cgroup.procs"
        yield str(members)

        until(partial(_leave, members, parent / members.name), 10)
        group.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


@pytest.mark.slow
def test_a_worker_that_the_kernel_kills_for_memory_is_told_from_one_that_is_killed(
    tmp_path: Path, small_cgroup: str
) -> None:
    server = open_server(tmp_path)
    Path(small_cgroup).write_text(str(server.pid))  # as a node's Ray is in one with its workers
    failure = failure_of(server.process(run=f"kept = {TOO_MUCH}"))
    assert failure.failure_class is FailureClass.HOST_OUT_OF_MEMORY
    assert "the kernel killed the worker for want of host memory" in failure.message
    close_server(server)


@pytest.mark.slow
def test_a_worker_is_not_taken_for_one_that_the_kernel_killed_elsewhere(
    fresh: Server, small_cgroup: str
) -> None:
    """The kernel kills a process of another control group just when somebody kills the worker."""
    stranger = f"open({small_cgroup!r}, 'w').write(str(os.getpid())); kept = {TOO_MUCH}"
    source = f"""
import signal, subprocess, sys
done = subprocess.run([sys.executable, "-c", "import os; " + {stranger!r}])
assert done.returncode == -signal.SIGKILL, done
os.kill(os.getpid(), signal.SIGKILL)
"""
    failure = failure_of(fresh.process(run=source))
    assert failure.failure_class is FailureClass.CRASH and "SIGKILL" in failure.message
