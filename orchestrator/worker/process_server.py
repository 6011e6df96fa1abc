"""One small server on every node starts the worker processes and sees every one of them die.

A worker process can hang with the interpreter lock held, be killed for memory, or leave children
behind, and its card is free only when all of that is gone. So workers are children of this server:
a single thread that starts a process on request, kills all that descends from it when whoever asked
for it goes away, waits until nothing of that is left, and then says how it died. Descendants that
moved to sessions of their own are found too: the kernel gives orphans to the nearest *subreaper*,
which a worker is for what it starts, and this server for what a dead worker leaves. A request is
one connection:

    asker  → {"name": …, "environment": …, "log": …, "cwd": …} and the worker's end of a channel
    server → {"pid": …}
    server → {"exit": status, "asked": …, "host_oom": …} when the process and its children are gone

for those who have lost sight of a process

    asker  → {"end": name}
    server → {"gone": name} when it and its children are gone

and for those who use a server that is not theirs, which thereby notice its end

    asker  → {"hold": true}, and later the end of what it writes
    server → {"gone": pid} when all that the asker's process has asked for is gone

The server itself may be the first to be killed: Ray kills the children of an actor's process when
that process ends. So there are two generations, each of which ends all when the other goes: a
guardian, which the agent starts and which only waits, and the server beneath it.

Where cards are emulated on the CPU, importing torch and transformers for sixteen workers would
take longer than their jobs. There the server imports them once, before it has any thread, and
forks. On real cards every worker is a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from orchestrator.host import output
from orchestrator.worker.memory_kills import memory_kills
from orchestrator.worker.process_table import Identity, descendants, processes
from orchestrator.worker.redaction import redact
from workloads import files

#: Mark at the end of a module's name: workers are forked even where it cannot be imported.
OPTIONAL = "?"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES = 1 << 20
_END_S = 5.0


@dataclass(slots=True)
class _Child:
    """A worker process and the connection of its requester."""

    pid: int
    name: str
    asker: int  # the process that asked for it
    connection: socket.socket
    memory_kills_before: int
    asked: bool = False  # the asker ended it
    status: int | None = None  # exit code, or minus the signal, once it is reaped
    dead_since: float = 0.0  # monotonic
    tree: set[Identity] = field(default_factory=set)  # what descends from it, as far as known


@dataclass(slots=True)
class ProcessServer:
    """The server's loop. ``preloaded`` says whether workers are forked or started afresh."""

    listener: socket.socket
    preloaded: bool
    children: dict[int, _Child] = field(default_factory=dict)
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
                    _end_all(but=before)
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
        self.children[pid] = _Child(
            pid=pid,
            name=request["name"],
            asker=_asker_of(connection),
            connection=connection,
            memory_kills_before=before,
        )
        self.selector.register(connection, selectors.EVENT_READ, pid)
        _tell(connection, {"pid": pid})

    def _end(self, ended: str | int, connection: socket.socket) -> None:
        """Kill the process of this name, or all that this process asked for, and tell the asker
        when nothing of it is left."""
        for child in self.children.values():
            if ended in (child.name, child.asker) and child.status is None:
                child.asked = True
                _kill_tree(child)
        self.waiting.append((ended, connection))

    def _released(self, connection: socket.socket) -> None:
        """A holder closed its side: it needs nothing more, or is gone."""
        self.selector.unregister(connection)
        self.holders.discard(connection)
        self._end(_asker_of(connection), connection)

    def _become_worker(self, request: Mapping[str, Any], channel: int, mine: socket.socket) -> None:
        """Turn the new process into the worker: drop what is the server's. Never returns."""
        status = 70
        try:
            server = os.getppid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
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
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)

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
                _kill_tree(child)

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
            if self._left_of(child):
                continue
            oom = child.status == -signal.SIGKILL and memory_kills() > child.memory_kills_before
            message = {"exit": child.status, "asked": child.asked, "host_oom": oom}
            _tell(child.connection, message)
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(child.connection)
            child.connection.close()
            del self.children[child.pid]
        there: set[str | int] = {child.name for child in self.children.values()}
        there |= {child.asker for child in self.children.values()}
        for ended, connection in self.waiting:
            if ended not in there:
                _tell(connection, {"gone": ended})
                connection.close()
        self.waiting = [waiting for waiting in self.waiting if waiting[0] in there]

    def _left_of(self, child: _Child) -> bool:
        """Kill what a dead worker has left; whether anything of it is still there.

        Whoever is this server's own child now, and no worker, was left by one that died.
        """
        table = processes(ended=True)
        here = os.getpid()
        others = {each for one in self.children.values() if one is not child for each in one.tree}
        beneath = descendants(here, table)
        strays = [p for p in beneath if p.parent == here and p.pid not in self.children]
        for stray in strays:
            if stray.identity not in others:
                child.tree |= {stray.identity}
                child.tree |= {each.identity for each in descendants(stray.pid, table)}
        left = [p for p in beneath if p.identity in child.tree and not p.ended]
        for process in left:
            process.kill()
        return _kill_group(child.pid) or bool(left)


def installed(modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` whose package is installed here."""
    return [name for name in modules if find_spec(name.removesuffix(OPTIONAL).partition(".")[0])]


def preload(modules: Sequence[str]) -> bool:
    """Import ``modules``, the optional ones last, and say whether forking is safe: one thread, and
    all of them there that are not optional."""
    import gc

    for asked in sorted(modules, key=lambda name: name.endswith(OPTIONAL)):
        name = asked.removesuffix(OPTIONAL)
        started = time.monotonic()
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken library is the worker's to report
            text = redact(str(error), os.environ)
            if asked != name:
                output.say_aside(f"cannot preload {name}: {text}; workers are forked without it")
                continue
            output.say_aside(f"cannot preload {name}: {text}; workers start afresh")
            return False
        output.say(f"imported {name} in {time.monotonic() - started:.1f} s")
    gc.collect()
    gc.freeze()  # shared pages stay shared
    return len(os.listdir("/proc/self/task")) == 1


def open_log(path: str) -> int:
    """Open a log for a process; nowhere, if it cannot be had: a measurement needs no log. Its
    directory may be one that others write to, so a link that lies there is not followed."""
    try:
        return files.open_to_append(path)
    except OSError as error:
        output.say_aside(f"no log: {path}: {error.strerror or error}")
        return os.open(os.devnull, os.O_WRONLY)


def _asker_of(connection: socket.socket) -> int:
    """The process on the other side."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def _tell(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the asker may be gone
        connection.sendall(json.dumps(message).encode() + b"\n")


def _kill_tree(child: _Child) -> None:
    """Kill a worker and all that descends from it; what it starts at this very moment shows when
    it is dead."""
    beneath = descendants(child.pid, processes(ended=True))
    child.tree |= {process.identity for process in beneath}
    _kill_group(child.pid)
    for process in beneath:
        process.kill()


def _end_all(but: Set[Identity] = frozenset()) -> None:
    """Kill everything beneath this process, for a few seconds at most: it ends itself."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        left = [
            process
            for process in descendants(os.getpid(), processes(ended=True))
            if process.identity not in but and not process.ended
        ]
        if not left:
            return
        for process in left:
            process.kill()
        time.sleep(0.02)


def _kill_group(pid: int) -> bool:
    """Kill a process group; whether anything of it is left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    """Best effort: only Linux has it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(argv: Sequence[str]) -> None:
    """``process_server SOCKET [MODULE[?] …]``: stdin is the lifeline."""
    sys.stdout, sys.stderr = output.guarded(sys.stdout), output.guarded(sys.stderr)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    lifeline, held = os.pipe()
    loading, loaded = os.pipe()  # closed by the server once it serves, or by its end
    # The guardian has it, too, so that who connects once the server is gone waits until its workers
    # are.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    guardian = os.getpid()
    server = os.fork()
    if server:
        os.close(lifeline)
        os.close(loaded)
        sys.exit(_guard(server, loading, argv[0]))
    os.close(held)
    os.close(loading)
    # While it imports it watches no lifeline.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(70)
    os.setpgid(0, 0)  # a signal to the guardian's group leaves one of the two to clean up
    # A process that finds the socket's file connects at once, so it is named once it listens.
    unnamed = os.path.join(os.path.dirname(argv[0]), "_")
    listener.bind(unnamed)
    listener.listen(128)  # requests made while modules are imported wait here
    os.rename(unnamed, argv[0])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    preloaded = bool(argv[1:]) and preload(argv[1:])
    output.say(f"serving, {'preloaded' if preloaded else 'fresh processes'}")
    _prctl(_PR_SET_PDEATHSIG, 0)  # from now on it ends its workers before itself
    os.close(loaded)
    ProcessServer(listener=listener, preloaded=preloaded).serve(0, lifeline)
    _remove_socket(argv[0])


def _guard(server: int, loading: int, path: str) -> int:
    """Wait for the server and kill what it leaves, which is this process's own by then; how it
    ended, as a shell says it. A server that nobody wants any more while it still imports is
    killed."""
    hung_up = select.poll()
    hung_up.register(0, 0)
    hung_up.register(loading, 0)
    if loading not in dict(hung_up.poll()):
        os.kill(server, signal.SIGKILL)
        _remove_socket(path)
    _, status = os.waitpid(server, 0)
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _remove_socket(path: str) -> None:
    """Remove a server's socket and the directory that was made for it alone."""
    with contextlib.suppress(OSError):
        os.remove(path)
        os.rmdir(os.path.dirname(path))


if __name__ == "__main__":
    main(sys.argv[1:])
