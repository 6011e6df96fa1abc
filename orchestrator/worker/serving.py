"""The loop of the process server: it starts workers, sees every one of them die, and says how.

A worker is gone when all that descends from it is (``child.py``). A request is one connection:

    asker  → {"name": …, "environment": …, "log": …, "cwd": …} and the worker's end of a channel
    server → {"pid": …}
    server → {"exit": status, "asked": …, "host_oom": …} when the process and its children are gone

for those who have lost sight of a process

    asker  → {"end": name}
    server → {"gone": name} when it and its children are gone

and for those who use a server that is not theirs, which thereby notice its end

    asker  → {"hold": true}, and later the end of what it writes
    server → {"gone": pid} when all that the asker's process has asked for is gone
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from orchestrator.host import output
from orchestrator.worker.child import Child, adopt_orphans, die_with_parent, end_all
from orchestrator.worker.memory_kills import memory_kills
from orchestrator.worker.process_table import descendants, processes
from orchestrator.worker.redaction import redact
from workloads.util import files

_REQUEST_BYTES = 1 << 20


@dataclass(slots=True)
class ProcessServer:
    """The server's loop. ``preloaded`` says whether workers are forked or started afresh."""

    listener: socket.socket
    preloaded: bool
    children: dict[int, Child] = field(default_factory=dict)
    #: For a name, or all that a process asked for, to be gone.
    waiting: list[tuple[str | int, socket.socket]] = field(default_factory=list)
    holders: set[socket.socket] = field(default_factory=set)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self, *lifelines: int) -> None:
        """Serve until one of ``lifelines`` (pipes that others hold open) closes; then kill every
        worker.

        The loop has one thread, as forking needs.
        """
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.listener, selectors.EVENT_READ, "listener")
        for lifeline in lifelines:
            self.selector.register(lifeline, selectors.EVENT_READ, "lifeline")
        self.selector.register(wake_read, selectors.EVENT_READ, "wake")
        before = {found.identity for found in descendants(os.getpid(), processes(ended=True))}
        while True:
            for key, _ in self.selector.select(self._patience_s()):
                if key.data == "lifeline" and not os.read(key.fd, 4096):
                    end_all(but=before)
                    return
                if key.data == "wake":
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                elif key.data == "listener":
                    self._start()
                elif isinstance(key.data, int):
                    self._asker_spoke(key.data)
                elif isinstance(key.data, socket.socket):
                    self._released(key.data)
            self._reap()

    def _patience_s(self) -> float | None:
        """Time to wait for a request: short while a process is ending; None for ever."""
        dead = [child.dead_since for child in self.children.values() if child.status is not None]
        if not dead:
            return None
        return 0.02 if time.monotonic() - max(dead) < 2.0 else 0.5

    def _start(self) -> None:
        """Take one request and start its process."""
        connection, _ = self.listener.accept()
        connection.settimeout(10)
        try:
            data, fds, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 1)
            while not data.endswith(b"\n"):
                more = connection.recv(_REQUEST_BYTES)
                if not more:
                    raise OSError("the request ends early")
                data += more
            request = json.loads(data)
            if not fds and not {"end", "hold"} & request.keys():
                raise OSError("the request brings no channel")
        except (OSError, ValueError) as error:
            output.say_aside(f"refused a request: {redact(str(error), os.environ)}")
            connection.close()
            return
        if "end" in request:
            self._end(request["end"], connection)
            return
        if "hold" in request:
            self.holders.add(connection)
            self.selector.register(connection, selectors.EVENT_READ, connection)
            return
        before = memory_kills()
        pid = os.fork()
        if pid == 0:
            self._become_worker(request, fds[0], connection)
        os.close(fds[0])
        with contextlib.suppress(OSError):  # in both, so that neither can be too late
            os.setpgid(pid, pid)
        connection.settimeout(None)
        self.children[pid] = Child(
            pid=pid,
            name=request["name"],
            asker=credentials_of(connection).pid,
            connection=connection,
            memory_kills_before=before,
        )
        self.selector.register(connection, selectors.EVENT_READ, pid)
        tell(connection, {"pid": pid})

    def _end(self, ended: str | int, connection: socket.socket) -> None:
        """Kill the process of this name, or all that this process asked for, and tell the asker
        when nothing of it is left."""
        for child in self.children.values():
            if ended in (child.name, child.asker) and child.status is None:
                child.asked = True
                child.kill()
        self.waiting.append((ended, connection))

    def _released(self, connection: socket.socket) -> None:
        """A holder closed its side: it needs nothing more, or is gone."""
        self.selector.unregister(connection)
        self.holders.discard(connection)
        self._end(credentials_of(connection).pid, connection)

    def _become_worker(self, request: Mapping[str, Any], channel: int, mine: socket.socket) -> None:
        """Turn the new process into the worker: drop what is the server's. Never returns."""
        status = 70
        try:
            server = os.getppid()
            die_with_parent()
            adopt_orphans()
            if os.getppid() != server:
                os._exit(status)
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.selector.close()
            self.listener.close()
            mine.close()
            for child in self.children.values():
                child.connection.close()
            for connection in (*self.holders, *(each for _, each in self.waiting)):
                connection.close()
            log = open_log(request["log"])
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(request["cwd"])
            if not self.preloaded:
                os.set_inheritable(channel, True)
                command = [sys.executable, "-m", "orchestrator.worker.worker_main", str(channel)]
                os.execve(sys.executable, command, request["environment"])
            os.environ.clear()
            os.environ.update(request["environment"])
            for path in reversed(request["environment"].get("PYTHONPATH", "").split(os.pathsep)):
                if path and path not in sys.path:
                    sys.path.insert(0, path)
            from orchestrator.worker import worker_main  # with torch, which the server may not have

            status = worker_main.serve(channel)
        except BaseException:
            import traceback

            with contextlib.suppress(Exception):
                traceback.print_exc()
        finally:
            leave(status)

    def _asker_spoke(self, pid: int) -> None:
        """The asker closed its side: it wants the process gone, or is gone itself."""
        child = self.children[pid]
        try:
            data = child.connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(child.connection)
            if child.status is None:
                child.asked = True
                child.kill()

    def _reap(self) -> None:
        """Collect dead processes; report those whose children are all dead, too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self.children:
                    self.children[pid].status = os.waitstatus_to_exitcode(status)
                    self.children[pid].dead_since = time.monotonic()
        for child in [child for child in self.children.values() if child.status is not None]:
            if child.kill_what_is_left(
                each for each in self.children.values() if each is not child
            ):
                continue
            oom = child.status == -signal.SIGKILL and memory_kills() > child.memory_kills_before
            message = {"exit": child.status, "asked": child.asked, "host_oom": oom}
            tell(child.connection, message)
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(child.connection)
            child.connection.close()
            del self.children[child.pid]
        there: set[str | int] = {child.name for child in self.children.values()}
        there |= {child.asker for child in self.children.values()}
        for ended, connection in self.waiting:
            if ended not in there:
                tell(connection, {"gone": ended})
                connection.close()
        self.waiting = [waiting for waiting in self.waiting if waiting[0] in there]


def leave(status: int) -> NoReturn:
    """End a forked process: what it printed is out, and nothing that it came with is cleaned up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def open_log(path: str) -> int:
    """Open a log for a process; nowhere, if it cannot be had: a measurement needs no log. Its
    directory may be one that others write to, so a link that lies there is not followed."""
    try:
        return files.open_to_append(path)
    except OSError as error:
        output.say_aside(f"no log: {path}: {error.strerror or error}")
        return os.open(os.devnull, os.O_WRONLY)


class Credentials(NamedTuple):
    """The process on the other side of a connection, as the kernel knows it."""

    pid: int
    uid: int
    gid: int


def credentials_of(connection: socket.socket) -> Credentials:
    """The process on the other side."""
    layout = struct.Struct("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return Credentials(*layout.unpack(found))


def tell(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message to an asker, which may be gone."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")
