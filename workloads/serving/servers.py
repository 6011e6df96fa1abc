"""Server processes: start, readiness, health, counters, and an end that leaves nothing.

A server is ready when it has generated a token, and healthy while tokens come: ``/health`` answers
long after generation is stuck. Servers listen on the loopback interface, each with a key of its
own; the end of what they wrote to stderr is quoted where they fail. A server that cannot have its
port is started again on another.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workloads import base
from workloads.base import BadConfiguration, OutOfMemory, ServerSilent, WorkloadError
from workloads.devices.base import Device, by_text
from workloads.engines import find_engine
from workloads.engines.base import ServerCommand, ServerPlace
from workloads.util.processes import descendants, kill, processes, started_ticks

HOST = "127.0.0.1"
#: Seconds without a token, while requests wait, after which a server counts as stuck; and how many
#: times the longest first token of its warm-up, if that is more.
SILENCE_S = 60.0
SILENCE_FACTOR = 5.0

_PORT_TRIES = 3
_POLL_S = 0.1
REQUEST_S = 30.0  # for /health and /metrics
END_S = 10.0  # of an orderly end, then of a killed process
_QUOTED_LINES = 20
_QUOTED_CHARACTERS = 3000
_QUOTED_LINE = 500
#: A server of several processes ends with the error of the one that waited for the others.
_ERROR = re.compile(r"(^|\] )[\w.]*(Error|Exception): ")
_PORT_TAKEN = ("address already in use", "errno 98", "port is already")
_BAD_ARGUMENTS = re.compile(r"error: (unrecognized arguments|argument |invalid|no such option)")
_OWN_ERROR = re.compile(r"^workloads\.base\.(\w+): (.+)$", re.MULTILINE)


class ServerFailed(WorkloadError):
    """A server ended by itself; the message quotes its stderr."""


class PortTaken(ServerFailed):
    """Another process has the server's port."""


#: An engine's ``serve``.
Serve = Callable[[Any, ServerPlace], ServerCommand]


class _Tail:
    """The last lines of a process's stderr, which also go to this one's."""

    def __init__(self, stream: Any) -> None:
        self.lines: deque[str] = deque(maxlen=400)
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            text = line.decode(errors="replace")
            self.lines.append(text)
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(text)
        stream.close()

    def text(self) -> str:
        """Everything so far, once the process has ended all of it."""
        self._thread.join(1.0)
        return "".join(self.lines)


@dataclass(eq=False, kw_only=True)
class Server:
    """One server: a process of ours, or one that was there already.

    It ends with ``stop``, with the last reference to this object, or with this process.
    """

    command: ServerCommand
    url: str  # up to and without ``/v1``
    key: str = field(repr=False)
    process: subprocess.Popen[bytes] | None = None
    tail: _Tail | None = None
    memory: set[str] = field(default_factory=set)  # its files of shared memory, by path
    #: Ends the process with its descendants, once, and removes its shared memory.
    stop: Callable[[], object] = lambda: None

    def check(self) -> None:
        """Raise ServerFailed, or the error that its stderr shows, if the process has ended."""
        if self.process is not None and (status := self.process.poll()) is not None:
            how = f"exit status {status}"
            if status < 0:
                how = f"signal {signal.Signals(-status).name}"
            raise ServerFailed(f"the server ended ({how}): {self.quoted() or 'no word on stderr'}")

    def quoted(self) -> str:
        """The end of its stderr, after the first error before that; without its key."""
        text = self.tail.text() if self.tail is not None else ""
        text = text.replace(self.key, "***") if self.key else text
        lines = text.strip().splitlines()
        earlier, last = lines[:-_QUOTED_LINES], lines[-_QUOTED_LINES:]
        first = next((line[-_QUOTED_LINE:] for line in earlier if _ERROR.search(line)), "")
        return f"{first}\n…\n" * bool(first) + "\n".join(last)[-_QUOTED_CHARACTERS:]

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> str:
        """The response to a GET, or to a POST of ``body``; OSError if it fails."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data=data)
        request.add_header("Content-Type", "application/json")
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as response:
                return str(response.read().decode(errors="replace"))
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise _HTTPStatus(error.code, f"HTTP {error.code}: {text}") from None

    def counters(self, timeout_s: float = REQUEST_S) -> dict[str, float]:
        """Its own counters by name (``SERVER_FIGURES``); empty if it has none or is too busy."""
        names = self.command.counters
        if not names:
            return {}
        try:
            text = self.ask("/metrics", timeout_s=timeout_s)
        except OSError:
            return {}
        sums = prometheus_sums(text)
        return {figure: sums[name] for figure, name in names.items() if name in sums}

    def first_token(self, *, timeout_s: float) -> float:
        """Ask for one token and return its seconds; OSError or ServerSilent if none comes."""
        began = time.monotonic()
        body = {"model": self.command.model, "prompt": "1", "max_tokens": 1, **self.command.body}
        answer = json.loads(self.ask("/v1/completions", body, timeout_s=timeout_s))
        if not answer.get("choices"):
            raise ServerSilent(f"the server answers without a token: {str(answer)[:300]}")
        return time.monotonic() - began

    def listens(self) -> bool:
        """Tell if the process, or one that it started, has the port; True for a server that was
        there already, OSError if nobody has it."""
        import psutil

        if self.process is None:
            return True
        port = int(self.url.rpartition(":")[2])
        socket.create_connection((HOST, port), 1.0).close()  # cheaper than what follows
        beneath = descendants(self.process.pid, processes())
        pids = {self.process.pid, *(stat.pid for stat in beneath)}
        listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
        return any(c.pid in pids for c in listening if c.laddr.port == port)


class _HTTPStatus(OSError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def prometheus_sums(text: str) -> dict[str, float]:
    """Values of Prometheus's text format by name, summed over labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition("{")[0].partition(" ")
        number = line.rpartition("}")[2].split() if "{" in line else value.split()
        with contextlib.suppress(ValueError, IndexError):
            if not line.startswith("#"):
                sums[name] = sums.get(name, 0.0) + float(number[0])
    return sums


# ---------------------------------------------------------------- start


def command_line(serve: Serve, request: base.Request, device: str) -> str:
    """The shell command that starts a request's server; "" for one that is there already. Raises
    what ``serve`` raises."""
    place = ServerPlace(host=HOST, port=8000, key="", device=device)
    arguments = serve(request, place).arguments
    python = [Path(part).name if part == sys.executable else part for part in arguments]
    return shlex.join(python)


def start(
    serve: Serve,
    request: base.Request,
    device: Device,
    *,
    key: str = "",
    environment: Mapping[str, str] | None = None,
    cards: int = 1,
    threads: int = 1,
    cores: Sequence[int] = (),
    limit_s: float = 1800.0,
    silence_s: float = SILENCE_S,
) -> Server:
    """Start a server and wait until it has generated a token.

    Requests must bear the ``key`` ("": a new one). ``environment`` has variables beside this
    process's, such as those of its cards; its processes may use these ``cores``, if any. It must be
    ready in ``limit_s``, with a first token ``silence_s`` after it says that it is healthy. Raises
    what its stderr shows (``explain``), else ServerFailed, or ServerSilent if it is not ready in
    time.
    """
    for last in (False,) * (_PORT_TRIES - 1) + (True,):
        place = ServerPlace(
            host=HOST,
            port=free_port(),
            key=key or secrets.token_urlsafe(24),
            device=device.name,
            cards=cards,
            threads=threads,
        )
        server = _started(serve(request, place), place, environment or {}, cores)
        try:
            _wait_until_ready(server, limit_s=limit_s, silence_s=silence_s)
        except BaseException as error:
            server.stop()
            if not isinstance(error, ServerFailed):
                raise
            known = explain(error, request.engine, device)
            if isinstance(known, PortTaken) and not last:
                continue
            raise known from error
        if server.process is not None:
            server.memory |= _shared_memory_of(server.process)
        return server
    raise AssertionError("unreachable")


def _started(
    command: ServerCommand, place: ServerPlace, environment: Mapping[str, str], cores: Sequence[int]
) -> Server:
    if not command.arguments:
        return Server(command=command, url=command.url, key=command.key)
    paths = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    variables = {**os.environ, "PYTHONPATH": paths, **environment, **command.environment}
    process = subprocess.Popen(
        command.arguments,
        env={name: value for name, value in variables.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process.pid, cores)
    server = Server(
        command=command,
        url=command.url or f"http://{place.host}:{place.port}",
        key=command.key or place.key,
        process=process,
        tail=_Tail(process.stderr),
    )
    server.stop = weakref.finalize(server, _end, process, server.memory)
    return server


def free_port() -> int:
    """A port of the loopback interface that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(server: Server, *, limit_s: float, silence_s: float) -> None:
    until = time.monotonic() + limit_s
    last, owned = "no answer", False
    while True:
        server.check()
        if time.monotonic() > until:
            raise ServerSilent(
                f"the server is not ready after {limit_s:g} s ({last}): {server.quoted()}"
            )
        try:
            # A stranger that has the port may never answer, and this server die meanwhile.
            if owned or server.listens():
                owned = True
                server.ask(server.command.health, timeout_s=REQUEST_S)
                break
            last = "another process has its port"
        except OSError as error:
            last = str(error)
        time.sleep(_POLL_S)
    patience = max(silence_s, until - time.monotonic()) if server.process is None else silence_s
    try:
        server.first_token(timeout_s=patience)
    except TimeoutError:
        server.check()
        raise ServerSilent(
            f"the server says that it is healthy, and emits no token within {patience:g} s: "
            f"{server.quoted()}"
        ) from None
    except _HTTPStatus as error:
        server.check()
        kind = BadConfiguration if error.status < 500 else ServerFailed
        raise kind(f"the server refuses a request for one token: {error}") from None
    except (OSError, ValueError) as error:
        time.sleep(_POLL_S)
        server.check()
        raise ServerFailed(f"the server answers no request: {error}; {server.quoted()}") from None
    server.check()


def explain(error: ServerFailed, engine: str, device: Device) -> WorkloadError:
    """The class of failure that a server's stderr shows; the same error if it shows none."""
    text = str(error)
    lowered = text.lower()
    if any(words in lowered for words in _PORT_TAKEN):
        return PortTaken(text)
    if own := _OWN_ERROR.findall(text):
        kind = getattr(base, own[-1][0], None)
        if isinstance(kind, type) and issubclass(kind, WorkloadError):
            return kind(f"the server could not start: {own[-1][1]}")
    if _BAD_ARGUMENTS.search(lowered):
        return BadConfiguration(text)
    shown = RuntimeError(text)
    known = by_text(shown, find_engine(engine).errors) or device.classify(shown)
    if isinstance(known, MemoryError):
        known = OutOfMemory(text)
    return known if isinstance(known, WorkloadError) else error


# ---------------------------------------------------------------- end


def _end(process: subprocess.Popen[bytes], memory: set[str]) -> None:
    """End a process in order, then by force with what it started, and remove shared memory."""
    family = descendants(process.pid, processes())
    if process.poll() is None:
        memory |= _shared_memory_of(process)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for stat in family:
        kill(stat)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    until = time.monotonic() + END_S
    while time.monotonic() < until and any(
        started_ticks(stat.pid) == stat.started_ticks for stat in family
    ):
        time.sleep(_POLL_S / 2)
    for path in memory - _mapped(os.getpid()):
        with contextlib.suppress(OSError):
            if os.stat(path, follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(path)


def _shared_memory_of(process: subprocess.Popen[bytes]) -> set[str]:
    """Named files of shared memory that a process and its descendants have mapped."""
    beneath = descendants(process.pid, processes())
    return _mapped(process.pid).union(*(_mapped(stat.pid) for stat in beneath))


def _mapped(pid: int) -> set[str]:
    with contextlib.suppress(OSError, ValueError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        return set(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))
    return set()
