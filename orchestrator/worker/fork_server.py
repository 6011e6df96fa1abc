"""A process that has imported what workers need, and from which process servers are forked.

Imports take seconds and come out the same for every run of the same code, so a run may leave this
process behind for the next one (``kept_imports.py``), or begin it for itself before there is an
agent (``runtime/begun_imports.py``). It has no card, no lock, no Ray and no worker, and ends when
nothing that it forked has been there for a while. A request is one connection, with two
descriptors: the process server's lifeline and its log.

    asker  → {"token": …, "path": …, "settings": …, "owner": …, "environment": …, "socket": …,
              "modules": those that the process server imports besides}
    server → {"pid": …, "socket": …} once the process server listens there, or {"refused": reason}

The asker moves the socket to the place that it asked for. One that has waited too long does not,
and may have started a server of its own there.

What is forked is a guardian with a process server beneath it, as an agent would have started them
itself: with the agent's environment, priority, limits and mark. It does not end with this process.
An asker whose imports would not be these is refused: where a file that was imported has changed,
or a package would be found somewhere else.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import json
import os
import secrets
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Any

from orchestrator.host import output
from orchestrator.worker import process_server
from orchestrator.worker.private_directory import (
    KEPT_IMPORTS,
    make_private_directory,
    private_directories_in_use,
)
from orchestrator.worker.process_settings import ProcessSettings, take_mark
from orchestrator.worker.redaction import redact
from orchestrator.worker.serving import credentials_of, leave, open_log, tell
from workloads import files
from workloads.owned_directory import OwnedDirectory

#: Names in its directory.
SOCKET, TOKEN, LOG = "s", "token", "log"
#: Word of its log once it has imported everything.
READY = "keeping"
REQUEST_BYTES = 1 << 20


class RefusedError(Exception):
    """A request that is not fulfilled, with the reason."""


@dataclass(slots=True)
class Imported:
    """Files that this process has imported, and where it found its packages."""

    files: dict[str, tuple[int, ...]]
    packages: dict[str, str]

    @classmethod
    def now(cls, since_ns: int) -> Imported:
        """Everything that is imported now; a file that was written later than this may be another
        than the one that was read."""
        found = {}
        for module in list(sys.modules.values()):
            spec = getattr(module, "__spec__", None)
            if spec is not None and spec.has_location and spec.origin:
                state = _state_of(spec.origin)
                found[spec.origin] = () if state and state[0] >= since_ns else state
        packages = {name for name in sys.modules if "." not in name and name != "__main__"}
        return cls(files=found, packages={name: _place_of(name, sys.path) for name in packages})

    def differs(self, path: Sequence[str]) -> str:
        """Name a file or a package that a process with this path would import now otherwise; empty
        if there is none."""
        for file, state in self.files.items():
            if not state or _state_of(file) != state:
                return f"{file} has changed since it was imported"
        for name, place in self.packages.items():
            if _place_of(name, path) != place:
                return f"{name} would be imported from elsewhere"
        return ""


def _state_of(file: str) -> tuple[int, ...]:
    """Identity and time of a file; empty if it is gone."""
    with contextlib.suppress(OSError):
        status = os.stat(file)
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev
    return ()


def _place_of(name: str, path: Sequence[str]) -> str:
    """File or directories from which a package is imported; empty where no path leads to it."""
    spec = PathFinder.find_spec(name, list(path))
    if spec is None:
        return ""
    return spec.origin or " ".join(spec.submodule_search_locations or ())


@dataclass(slots=True)
class ForkServer:
    """The loop: forks on request, and ends after ``idle_s`` without anything that it forked."""

    listener: socket.socket
    token: str
    idle_s: float
    imported: Imported
    forked: set[int] = field(default_factory=set)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> None:
        """Serve until it has been idle for long enough, or is of no use any more."""
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        useful = True
        idle_since = time.monotonic()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(wake_read, selectors.EVENT_READ)
        while useful and (self.forked or time.monotonic() < idle_since + self.idle_s):
            left_s = idle_since + self.idle_s - time.monotonic()
            for key, _ in self.selector.select(None if self.forked else max(0.0, left_s)):
                if key.fileobj is self.listener:
                    useful = self._take()
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
            if self.forked:
                idle_since = time.monotonic()
            self._reap()

    def _take(self) -> bool:
        """Take one request; return whether this process is of use to others still."""
        connection, _ = self.listener.accept()
        descriptors: list[int] = []
        with connection:
            connection.settimeout(5)
            try:
                request, descriptors = _request_on(connection)
                self._check(request, descriptors)
                why = self.imported.differs(request["path"])
                if why:
                    raise RefusedError(why)
                pid = os.fork()
                if pid == 0:
                    self._become_process_server(request, descriptors, connection)
                self.forked.add(pid)
            except RefusedError as error:
                output.say_aside(f"refused a request: {error}")
                tell(connection, {"refused": str(error)})
                return not str(error).endswith("since it was imported")
            except (OSError, ValueError, KeyError, TypeError) as error:
                output.say_aside(f"refused a request: {redact(str(error), os.environ)}")
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        return True

    def _check(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        if not hmac.compare_digest(str(request["token"]).encode(), self.token.encode()):
            raise RefusedError("the token is wrong")
        if len(descriptors) != 2:
            raise RefusedError("the request brings no lifeline and log")
        hung_up = select.poll()
        hung_up.register(descriptors[0], 0)
        if hung_up.poll(0):
            raise RefusedError("who asked has gone")

    def _become_process_server(
        self, request: Mapping[str, Any], descriptors: Sequence[int], connection: socket.socket
    ) -> None:
        """Turn the new process into a guardian and a process server. Never returns."""
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            self.selector.close()
            self.listener.close()
            for target, descriptor in enumerate((descriptors[0], descriptors[1], descriptors[1])):
                os.dup2(descriptor, target)
            for descriptor in descriptors:
                os.close(descriptor)
            try:
                ProcessSettings.of(request["settings"]).take()
                take_mark(request["owner"])
            except (OSError, TypeError) as error:
                tell(connection, {"refused": str(error)})
                os._exit(status)
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.path[:] = request["path"]  # for what is imported from now on
            importlib.invalidate_caches()
            more = [str(name) for name in request.get("modules", ())]
            status = process_server.run(
                request["socket"],
                lambda: not more or process_server.preload(more),
                connection,
            )
        except BaseException:
            import traceback

            with contextlib.suppress(Exception):
                traceback.print_exc()
        finally:
            leave(status)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self.forked.discard(pid)


def _request_on(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request of a process of this user, and the descriptors that it brings.

    Raises:
        RefusedError: the process is another user's.
        OSError: it ends early.
        ValueError: it is no request.
    """
    if credentials_of(connection).uid != os.geteuid():
        raise RefusedError("the process is another user's")
    data, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 2)
    try:
        while not data.endswith(b"\n"):
            more = connection.recv(REQUEST_BYTES)
            if not more or len(data) > REQUEST_BYTES:
                raise OSError("the request ends early, or not at all")
            data += more
        request = json.loads(data)
        if not isinstance(request, dict):
            raise ValueError("no object")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return request, list(descriptors)


def _is_late(mine: OwnedDirectory) -> bool:
    """Tell if a process that began before this one keeps the same imports; it is enough."""

    def began(directory: OwnedDirectory) -> tuple[int, int]:
        return directory.process.started_ticks, directory.process.pid

    there = private_directories_in_use(KEPT_IMPORTS)
    return any(began(each) < began(mine) for each in there if each.owner == mine.owner)


def serve_imports(
    directory: OwnedDirectory,
    modules: Sequence[str],
    *,
    idle_s: float,
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Import modules in this process, and fork process servers from it until it is idle for long.

    Args:
        directory: of its socket, token and log; removed in the end.
        modules: with a question mark behind those that may be missing.
        idle_s: how long it waits when nothing that it forked is there.
        is_late: tells if it need not go on, as another does the same.
    """
    try:
        with os.fdopen(files.create(directory.path / TOKEN, 0o600), "w") as file:
            token = secrets.token_hex(32)
            file.write(token)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(directory.path / SOCKET))
        listener.listen(128)
        log = open_log(str(directory.path / LOG))
        os.write(1, f"{directory.path}\n".encode())  # to the process that started it
        os.chdir("/")
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout, sys.stderr = output.guarded(sys.stdout), output.guarded(sys.stderr)
        # Asked twice: one that began earlier may have been seen by nobody yet.
        if not is_late() and process_server.preload(modules) and not is_late():
            output.say(f"{READY} {len(sys.modules)} modules")
            server = ForkServer(
                listener=listener,
                token=token,
                idle_s=idle_s,
                imported=Imported.now(os.stat(directory.path / TOKEN).st_mtime_ns),
            )
            server.serve()
    finally:
        directory.remove()


def main(argv: Sequence[str]) -> None:
    """``fork_server KEY IDLE_S MODULE[?] …``: prints its directory, and goes on by itself."""
    if os.fork():  # whoever started it may end, and what it started is killed then
        os._exit(0)
    os.setsid()
    mine = make_private_directory(argv[0], KEPT_IMPORTS)
    serve_imports(mine, argv[2:], idle_s=float(argv[1]), is_late=lambda: _is_late(mine))


if __name__ == "__main__":
    main(sys.argv[1:])
