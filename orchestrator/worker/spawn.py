"""The spawner: starts worker processes, reports their ends, and leaves nothing of them running.

A worker may hang with the GIL, be OOM-killed or leave children behind, and its card is free only
when all of them are gone. So workers are children of a small single-threaded process. A connection
to it starts one worker and lives as long as that:

    client  → {"environment": …, "log": …, "cwd": …, "fresh": …}, the worker's end of a channel
    spawner → its process id
    spawner → {"exit": status, "host_oom": …} when the process and its children are gone

A further message, or the client's end, kills the worker; a connection without a request reports the
spawner's end. The spawner is a *subreaper*, so it inherits a dead worker's descendants; a reaper
process waits above it, since Ray may kill the spawner first: each ends everything when the other is
gone. On real cards, and with software of its own, a worker is a fresh interpreter. For CPU cards
the spawner imports torch and transformers once, before it has threads, and forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.util import output
from orchestrator.util.redaction import redact
from orchestrator.worker import orphans
from orchestrator.worker.memory_limit import memory_kills
from workloads.devices import environment_for, host_device
from workloads.util import files
from workloads.util.processes import OwnedDirectory, owned_directory

#: Modules that a node which computes on the CPU imports once, for all its workers.
PRELOAD = (
    "torch",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.glm.modeling_glm",
    "transformers.models.llama.modeling_llama",
    "orchestrator.worker.worker",
    "workloads.text_generation",
    "workloads.engines.transformers.generation",
)
#: Keeps Arrow's allocator and OpenBLAS from starting threads, which would rule out forking.
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
_SOCKET = "s"
_END_S = 10.0
_LOOK_S = 0.05  # between two looks for workers that have ended

# ---------------------------------------------------------------- in the client


class SpawnedProcess:
    """Client's handle of one worker process."""

    def __init__(
        self,
        spawner: str,
        *,
        environment: Mapping[str, str],
        log: str,
        channel: int,
        fresh: bool = False,
    ) -> None:
        """Start a process with this end of a socket pair, never forked if ``fresh``; raise OSError
        or EOFError if the spawner is gone."""
        self._connection = Client(spawner)
        self._connection.send(
            {"environment": dict(environment), "log": log, "cwd": os.getcwd(), "fresh": fresh}
        )
        send_handle(self._connection, channel, None)
        self.pid: int = self._connection.recv()

    def kill(self) -> None:
        """Have the process and its descendants killed; ``wait`` returns when they are gone."""
        with contextlib.suppress(OSError):
            self._connection.send("end")

    def wait(self) -> Mapping[str, Any]:
        """Wait for the end of the whole process tree; for one thread only.

        Return ``exit`` (code, or minus the signal) and ``host_oom``; raise EOFError or OSError if
        the spawner died, and with it the process.
        """
        with self._connection:
            status: Mapping[str, Any] = self._connection.recv()
        return status


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSpawner:
    """A spawner of this host, for agents whose workers have as many threads."""

    path: str  # its socket
    threads: int

    def serves(self, threads: int) -> bool:
        """Return whether it runs and its workers have so many threads."""
        if self.threads != threads:
            return False
        try:
            Client(self.path).close()
        except OSError as error:
            output.say_aside(f"the spawner of all nodes is gone ({error}): starting another")
            return False
        return True


class OwnSpawner:
    """A spawner started by this process, which ends with it: of an agent, or of a driver for all
    agents of its host. Raises OSError if it cannot start.

    Without modules to ``preload``, each worker is a fresh interpreter. OpenMP reads ``threads``
    when torch is imported, which may be in the spawner.
    """

    def __init__(self, preload: Sequence[str], *, threads: int, log: Path) -> None:
        orphans.remove_abandoned()
        self._directory = orphans.make_private_directory(os.environ.get(orphans.VARIABLE, ""))
        path = str(self._directory.path / _SOCKET)
        self.shared = SharedSpawner(path=path, threads=threads)
        with contextlib.suppress(OSError):  # then it has no log
            log.parent.mkdir(parents=True, exist_ok=True)
        shown = environment_for(host_device().name, 0, threads=threads)
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with contextlib.ExitStack() as failing, contextlib.ExitStack() as done:
            failing.callback(self._directory.remove)
            listener = done.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(path)
            listener.listen(128)  # requests made while modules are imported wait here
            logged = open_log(str(log))
            done.callback(os.close, logged)
            number, module = str(listener.fileno()), "orchestrator.worker.spawn"
            self.reaper = subprocess.Popen(
                [sys.executable, "-m", module, number, str(self._directory.path), *preload],
                stdin=subprocess.PIPE,
                stdout=logged,
                stderr=logged,
                pass_fds=[listener.fileno()],
                env=_NO_THREADS | os.environ | shown | paths,
                start_new_session=True,  # Ctrl-C is for the driver, which ends its jobs in order
            )
            failing.pop_all()

    def release(self) -> None:
        """Have it end, with all its workers."""
        assert self.reaper.stdin is not None
        with contextlib.suppress(OSError):
            self.reaper.stdin.close()

    def close(self) -> None:
        """End it and all its workers; returns when they are gone."""
        self.release()
        try:
            self.reaper.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.reaper.kill()  # without it the spawner ends everything
            self.reaper.wait()
        self._directory.remove()


def wait_for_end(path: str) -> None:
    """Wait for the end of the spawner of this socket, its reaper and all its workers."""
    with contextlib.suppress(OSError):
        while True:
            with Client(path) as connection, contextlib.suppress(EOFError):
                connection.recv()


def log_name() -> str:
    """Name of the log of a spawner that this process starts."""
    return f"spawner-{socket.gethostname()}-{os.getpid()}.log"


def open_log(path: str) -> int:
    """Open a process's log without following links (others may write there), else /dev/null."""
    try:
        return files.open_to_append(path)
    except OSError as error:
        output.say_aside(f"no log: {path}: {error.strerror or error}")
        return os.open(os.devnull, os.O_WRONLY)


# ---------------------------------------------------------------- in the spawner


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    connection: Connection
    memory_kills_before: int
    status: int | None = None  # exit code, or minus the signal, once it is reaped
    tree: set[tuple[int, int]] = field(default_factory=set)  # its descendants, as far as known

    def kill(self) -> None:
        """Kill it and its descendants; ``_kill_remains`` finds any that it starts meanwhile."""
        beneath = orphans.descendants(self.pid, orphans.processes(ended=True))
        self.tree |= {process.identity for process in beneath}
        _kill_group(self.pid)
        for process in beneath:
            orphans.kill(process)


class Spawner:
    """The loop that starts workers, by forking or as fresh interpreters, and sees them end."""

    def __init__(self, listener: socket.socket, *, forks: bool) -> None:
        self._listener, self._forks = listener, forks
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, *lifelines: int) -> None:
        """Serve, in one thread since it forks, until a lifeline pipe closes; kill all workers."""
        sources: tuple[Any, ...] = (self._listener, *lifelines)
        for source in sources:
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(_LOOK_S if self._workers else None):
                if key.fileobj is self._listener:
                    connection = Connection(self._listener.accept()[0].detach())
                    self._selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.data, _Worker):  # its client is gone, or wants it gone
                    self._selector.unregister(key.fileobj)
                    key.data.kill()
                elif isinstance(key.fileobj, Connection):
                    self._start(key.fileobj)
                elif not os.read(key.fd, 4096):
                    orphans.end_descendants()
                    return
            self._reap()

    def _start(self, connection: Connection) -> None:
        """Take a request and start its process."""
        self._selector.unregister(connection)
        try:
            request, channel = connection.recv(), recv_handle(connection)
        except (EOFError, OSError):  # it only waits for our end, or is gone itself
            connection.close()
            return
        before = memory_kills()
        pid = os.fork()
        if pid == 0:
            self._become_worker(request, channel, connection)
        os.close(channel)
        with contextlib.suppress(OSError):  # in both, so that neither can be too late
            os.setpgid(pid, pid)
        worker = _Worker(pid=pid, connection=connection, memory_kills_before=before)
        self._workers[pid] = worker
        self._selector.register(connection, selectors.EVENT_READ, worker)
        with contextlib.suppress(OSError):
            connection.send(pid)

    def _become_worker(
        self, request: Mapping[str, Any], channel: int, connection: Connection
    ) -> NoReturn:
        status = 70
        try:
            spawner = os.getppid()
            orphans.die_with_parent()
            orphans.become_subreaper()
            if os.getppid() != spawner:
                os._exit(status)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket | Connection):
                    key.fileobj.close()
                elif key.fd:  # standard input is replaced below
                    os.close(key.fd)
            self._selector.close()
            connection.close()
            for worker in self._workers.values():
                worker.connection.close()
            log = open_log(request["log"])
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(request["cwd"])
            environment = request["environment"]
            if request["fresh"] or not self._forks:
                os.set_inheritable(channel, True)
                command = [sys.executable, "-m", "orchestrator.worker.main", str(channel)]
                os.execve(sys.executable, command, environment)
            os.environ.clear()
            os.environ.update(environment)
            paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
            sys.path[:0] = [path for path in paths if path not in sys.path]
            from orchestrator.worker import main as worker_main

            status = worker_main.serve(channel)
        except BaseException:
            with contextlib.suppress(Exception):
                traceback.print_exc()
        finally:
            _leave(status)

    def _reap(self) -> None:
        """Collect dead processes; report those whose descendants are all dead, too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if worker := self._workers.get(ended[0]):
                    worker.status = os.waitstatus_to_exitcode(ended[1])
        for worker in [w for w in self._workers.values() if w.status is not None]:
            if self._kill_remains(worker):
                continue
            killed = worker.status == -signal.SIGKILL
            oom = killed and memory_kills() > worker.memory_kills_before
            with contextlib.suppress(OSError):
                worker.connection.send({"exit": worker.status, "host_oom": oom})
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(worker.connection)
            worker.connection.close()
            del self._workers[worker.pid]

    def _kill_remains(self, dead: _Worker) -> bool:
        """Kill a dead worker's descendants; return whether any are left."""
        # Children of this process outside every worker's tree are orphans of a dead worker.
        table, here = orphans.processes(ended=True), os.getpid()
        others = [worker for worker in self._workers.values() if worker is not dead]
        claimed = {identity for worker in others for identity in worker.tree}
        beneath = orphans.descendants(here, table)
        for orphan in beneath:
            is_worker = orphan.pid in self._workers
            if orphan.parent == here and not is_worker and orphan.identity not in claimed:
                tree = (orphan, *orphans.descendants(orphan.pid, table))
                dead.tree |= {process.identity for process in tree}
        remains = [p for p in beneath if p.identity in dead.tree and not p.ended]
        for process in remains:
            orphans.kill(process)
        return _kill_group(dead.pid) or bool(remains)


def _kill_group(pid: int) -> bool:
    """Kill a process group; return whether anything of it was left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _leave(status: int) -> NoReturn:
    """Flush and end a forked process without running the parent's exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


# ---------------------------------------------------------------- the reaper and the spawner start


def preload(modules: Sequence[str]) -> bool:
    """Import the installed, working ``modules``; return whether workers can be forked."""
    for name in modules:
        if find_spec(name.partition(".")[0]) is None:
            continue
        started = time.monotonic()
        try:
            importlib.import_module(name)
        except Exception as error:
            output.say_aside(f"cannot preload {name}: {redact(str(error), os.environ)}")
        else:
            output.say(f"imported {name} in {time.monotonic() - started:.1f} s")
    gc.freeze()  # shared pages stay shared
    return bool(modules) and len(os.listdir("/proc/self/task")) == 1


def main(argv: Sequence[str]) -> int:
    """``spawn LISTENER DIRECTORY [MODULE …]``: become a reaper with a spawner beneath it; return
    the spawner's exit status. Standard input is the lifeline; the directory, which is the
    socket's, is removed at the end."""
    sys.stdout, sys.stderr = output.guarded(sys.stdout), output.guarded(sys.stderr)
    listener, directory = socket.socket(fileno=int(argv[0])), Path(argv[1])
    listener.set_inheritable(False)
    orphans.become_subreaper()
    reaper_lives, held_by_reaper = os.pipe()
    loading, held_while_loading = os.pipe()
    reaper, spawner = os.getpid(), os.fork()
    if spawner:
        os.close(reaper_lives)
        os.close(held_while_loading)
        return _reap(spawner, loading, directory)
    os.close(held_by_reaper)
    os.close(loading)
    orphans.die_with_parent()  # while it imports it watches no lifeline
    if os.getppid() != reaper:
        os._exit(70)
    os.setpgid(0, 0)  # a signal to the reaper's group leaves one of the two to clean up
    orphans.become_subreaper()
    forks = preload(argv[2:])
    output.say(f"serving, {'forked workers' if forks else 'fresh interpreters'}")
    orphans.die_with_parent(then=False)  # from now on it ends its workers before itself
    os.close(held_while_loading)
    Spawner(listener, forks=forks).serve(0, reaper_lives)
    _remove(directory)
    _leave(0)


def _reap(spawner: int, loading: int, directory: Path) -> int:
    """Wait for the spawner, kill its remains, and return its exit status as a shell would.

    Kills a spawner that still imports when standard input (the lifeline) closes.
    """
    hung_up = select.poll()
    hung_up.register(0, 0)
    hung_up.register(loading, 0)
    if loading not in dict(hung_up.poll()):
        os.kill(spawner, signal.SIGKILL)
    _, status = os.waitpid(spawner, 0)
    orphans.end_descendants()
    _remove(directory)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _remove(path: Path) -> None:
    directory: OwnedDirectory | None = owned_directory(path)
    if directory is not None:
        directory.remove()


if __name__ == "__main__":
    # This module is __main__ here; workers import the importable one.
    from orchestrator.worker.spawn import main as importable_main

    sys.exit(importable_main(sys.argv[1:]))
