"""Imports that a run leaves on a host for the next one, and their use.

A run that is told to (``--keep-imports``, or the variable ``KEEP`` on a node) leaves a fork server
(``fork_server.py``) behind on each host where workers are forked. The agent of a later run has its
process server forked there, if that comes out as its own would: same user, code, packages,
environment, container and threads. All of this is decided by the agent on its own host. Where there
is no such process, or it does not answer at once, the agent starts a process server as always.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.host import output
from orchestrator.worker.fork_server import LOG, READY, SOCKET, TOKEN
from orchestrator.worker.leftovers import VARIABLE
from orchestrator.worker.private_directory import (
    BEGUN_IMPORTS,
    KEPT_IMPORTS,
    private_directories_in_use,
    process_of,
)
from orchestrator.worker.process_settings import (
    ProcessSettings,
    start_without_owner,
    status_of_this_process,
)
from orchestrator.worker.process_table import Process
from workloads import files
from workloads.devices import all_devices
from workloads.owned_directory import OwnedDirectory

#: Set to anything but 0, runs keep their imports.
KEEP = "NIGHTGRID_KEEP_IMPORTS"
IDLE_S = 600.0
#: For an answer: forking takes milliseconds, what is left of an import a few seconds.
ANSWER_S = 5.0
#: For one of imports that a command began: all of an import, on a busy machine, that was begun
#: earlier than its asker's own would be.
BEGUN_ANSWER_S = 30.0
START_S = 10.0
_END_S = 5.0
#: Variables that say nothing about what imports come to: of Ray's own, of a login and a terminal.
_NEUTRAL_PREFIXES = ("RAY_", "SSH_", "XDG_SESSION")
_NEUTRAL = frozenset(
    ("_", "COLUMNS", "INVOCATION_ID", "JOURNAL_STREAM", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM")
) | {"PYTHONBREAKPOINT", "SPT_NOENV"}  # which Ray sets in its processes
#: Signals that only a terminal sends, and a fork server has none.
_OF_A_TERMINAL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_PACKAGE_SUFFIXES = (".dist-info", ".egg-info", ".egg-link", ".pth")
_RIGHTS = ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "SigIgn")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptImports:
    """A fork server of this user on this host."""

    directory: OwnedDirectory

    @property
    def process(self) -> Process:
        """The process itself."""
        return process_of(self.directory)

    @property
    def log(self) -> Path:
        """Its log."""
        return self.directory.path / LOG

    @property
    def ready(self) -> bool:
        """Return whether it has imported everything."""
        with contextlib.suppress(OSError):
            return READY in files.read_text(self.log)
        return False

    def end(self) -> bool:
        """End it; process servers that it has forked go on. Return whether it is gone."""
        deadline = time.monotonic() + _END_S
        while self.process.runs() and time.monotonic() < deadline:
            self.process.kill()
            time.sleep(0.01)
        if self.process.runs():
            return False
        self.directory.remove()
        return True


def kept_imports() -> list[KeptImports]:
    """The fork servers that other runs of this user have left on this host, those that still import
    included."""
    return [KeptImports(directory=each) for each in private_directories_in_use(KEPT_IMPORTS)]


def begun_imports() -> list[KeptImports]:
    """The fork servers that commands of this user have begun on this host for their own runs."""
    return [KeptImports(directory=each) for each in private_directories_in_use(BEGUN_IMPORTS)]


class ForkedServer:
    """A process server that was forked for this process. It ends with the lifeline to it."""

    def __init__(self, lifeline: socket.socket) -> None:
        self._lifeline = lifeline

    def release(self) -> None:
        """Have it end, with every worker; ``wait`` says when it is gone."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_WR)

    def wait(self) -> None:
        """Wait until its guardian and itself are gone, which have the other end. For one thread."""
        with self._lifeline, contextlib.suppress(OSError):
            while self._lifeline.recv(4096):
                pass

    def end(self, patience_s: float) -> None:
        """Have it end, and wait until it is gone, not longer than this."""
        self._lifeline.settimeout(patience_s)
        self.release()
        self.wait()


def forked_server(
    path: str,
    modules: Sequence[str],
    environment: Mapping[str, str],
    log: int,
    base: Sequence[str] = (),
) -> ForkedServer | None:
    """Have a process server forked that listens at ``path``; None where nothing is kept or begun
    that comes out as this process's own imports of ``modules`` would, and answers.

    Args:
        modules: those that are installed here.
        base: those of them that a command begins before it knows the others.
        environment: in which this process would start a process server.
        log: of the process server, an open file.
    """
    ways = [(kept_imports, modules, ANSWER_S)]
    if set(base) <= set(modules):
        ways.append((begun_imports, base, BEGUN_ANSWER_S))
    for there, imported, answer_s in ways:
        found = there()
        if not found:
            continue
        try:
            key = key_of(imported, environment)
        except (OSError, KeyError):
            return None
        more = [name for name in modules if name not in imported]
        for each in found:
            if each.directory.owner == key:
                try:
                    return _ask(each.directory.path, path, environment, log, more, answer_s)
                except (OSError, ValueError) as error:
                    pid = each.process.pid
                    output.say_aside(f"kept imports of process {pid} not used: {error}")
    return None


def _ask(
    directory: Path,
    path: str,
    environment: Mapping[str, str],
    log: int,
    modules: Sequence[str],
    answer_s: float,
) -> ForkedServer:
    """Ask a fork server for a process server.

    Raises:
        OSError: it is gone, refuses, or does not answer.
        ValueError: its answer is none.
    """
    mine, theirs = socket.socketpair()
    try:
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(answer_s)
            connection.connect(str(directory / SOCKET))
            request = {
                "token": files.read_text(directory / TOKEN),
                "path": import_path(),
                "settings": dataclasses.asdict(ProcessSettings.of_this_process()),
                "owner": environment.get(VARIABLE, ""),
                "environment": dict(environment),
                "socket": path,
                "modules": list(modules),
            }
            data = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(connection, [data], [theirs.fileno(), log])
            connection.sendall(data[sent:])
            theirs.close()
            with connection.makefile("r") as answers:
                answer = json.loads(answers.readline(4096) or "{}")
        if "pid" not in answer:
            raise OSError(answer.get("refused", "it ended before it answered"))
        os.rename(answer["socket"], path)
    except BaseException:
        mine.close()
        raise
    return ForkedServer(mine)


def keeper(
    modules: Sequence[str], environment: Mapping[str, str], *, idle_s: float = IDLE_S
) -> Callable[[], None]:
    """Leave a fork server behind that imports these modules as this process would now, unless there
    is one, by the call of what is returned. It does not end with this process; where it cannot be
    started, the next run imports by itself."""
    try:
        key = key_of(modules, environment)
    except (OSError, KeyError) as error:
        output.say_aside(f"imports cannot be kept: {error}")
        return lambda: None
    command = [sys.executable, "-m", "orchestrator.worker.fork_server", key, str(idle_s), *modules]
    return lambda: _start(command, key, environment)


def _start(command: Sequence[str], key: str, environment: Mapping[str, str]) -> None:
    if any(each.directory.owner == key for each in kept_imports()):
        return
    try:
        started = start_without_owner(command, environment, subprocess.PIPE)
    except OSError as error:
        output.say_aside(f"imports cannot be kept: {error}")
        return
    assert started.stdout is not None
    with started.stdout:
        # It goes on in a child of its own, which says so, or is not there.
        told = select.poll()
        told.register(started.stdout, select.POLLIN)
        if not told.poll(START_S * 1000):
            output.say_aside(f"imports cannot be kept: not begun after {START_S:g} s")
            started.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(START_S)


def key_of(modules: Sequence[str], environment: Mapping[str, str]) -> str:
    """The identity of what a process of this one's user and container would have after importing
    ``modules`` in an environment. Where packages are found, and whether their files have changed, a
    fork server checks itself.

    Raises:
        OSError: this host does not tell.
        KeyError: likewise.
    """
    neutral = _NEUTRAL | {VARIABLE, KEEP, "PYTHONPATH"}
    neutral |= {spec.visible_variable for spec in all_devices()}
    status, root = dict(status_of_this_process()), os.stat("/")
    status["SigIgn"] = _but_of_terminals(status.get("SigIgn", "0"))
    known = {
        "modules": list(modules),
        "python": [sys.executable, sys.prefix, sys.version],
        "packages": sorted(
            name for entry in import_path() for name in _names_in(entry, _PACKAGE_SUFFIXES)
        ),
        "environment": sorted(
            each
            for each in environment.items()
            if each[0] not in neutral and not each[0].startswith(_NEUTRAL_PREFIXES)
        ),
        "rights": [status[name] for name in _RIGHTS if name in status],
        "root": [root.st_dev, root.st_ino],
        "namespaces": [
            os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))
        ],
        "control group": Path("/proc/self/cgroup").read_text(),
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _but_of_terminals(mask: str) -> str:
    """A set of signals, as the kernel words it, without those that only a terminal sends."""
    return f"{int(mask, 16) & ~sum(1 << number - 1 for number in _OF_A_TERMINAL):016x}"


def import_path() -> list[str]:
    """Places in which this process looks for modules, directories and archives as absolute paths;
    there are others, of import hooks."""
    given = [entry for entry in sys.path if entry]
    there = (os.path.abspath(entry) if os.path.exists(entry) else entry for entry in given)
    return list(dict.fromkeys(there))


def _names_in(directory: str, suffixes: tuple[str, ...]) -> list[str]:
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(directory) if name.endswith(suffixes)]
    return []
