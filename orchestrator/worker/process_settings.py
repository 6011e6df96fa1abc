"""Settings that a process inherits from the one that starts it, for one that has another parent.

A process server that is forked from a fork server (``fork_server.py``) has to be as if its agent
had started it: with the agent's priority, cores, limits and mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.worker.leftovers import VARIABLE

#: A fork server is started with this in the place of an owner's mark; it names no owner.
NO_OWNER = "-" * 120
_CAP_SYS_NICE = 23
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings that the kernel keeps of a process and gives to its children."""

    niceness: int
    oom_score: int  # that the kernel adds when it looks for a process to kill
    cores: list[int]
    umask: int
    limits: Mapping[str, list[int]]  # soft and hard, by name

    @classmethod
    def of_this_process(cls) -> ProcessSettings:
        """The settings of the calling thread.

        Raises:
            OSError: the kernel does not show them.
        """
        return cls(
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            oom_score=int(_OOM_SCORE.read_text()),
            cores=sorted(os.sched_getaffinity(0)),
            umask=int(status_of_this_process()["Umask"], 8),
            limits={name: list(resource.getrlimit(limit)) for name, limit in _LIMITS.items()},
        )

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ProcessSettings:
        """The settings in a request, as ``dataclasses.asdict`` made them.

        Raises:
            TypeError: they are none.
        """
        return cls(**told)

    def take(self) -> None:
        """Give these settings to this process, which must have one thread.

        Raises:
            OSError: it may not have them.
        """
        if self.niceness != os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        if self.oom_score != int(_OOM_SCORE.read_text()):
            _OOM_SCORE.write_text(str(self.oom_score))
        os.sched_setaffinity(0, self.cores)
        os.umask(self.umask)
        for name, (soft, hard) in self.limits.items():
            if resource.getrlimit(_LIMITS[name]) != (soft, hard):
                try:
                    resource.setrlimit(_LIMITS[name], (soft, hard))
                except ValueError as error:
                    raise OSError(f"{name}: {error}") from error
        if ProcessSettings.of_this_process() != self:
            raise OSError("the kernel gave other settings than those asked for")


def start_without_owner(
    command: Sequence[str], environment: Mapping[str, str], stdout: int
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that Ctrl-C is not for it, with room for the
    mark that whoever is forked from it takes.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        env={**environment, VARIABLE: NO_OWNER},
        start_new_session=True,
    )


def take_mark(mark: str) -> None:
    """Replace ``NO_OWNER`` by an owner's mark in the environment that the kernel shows of this
    process and of those that it forks, by which ``leftovers.py`` knows them.

    Raises:
        OSError: this process was not started with ``NO_OWNER``.
    """
    words = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(words[47]), int(words[48])
    placeholder = f"{VARIABLE}={NO_OWNER}".encode()
    value = f"{VARIABLE}={mark}".encode()
    at = ctypes.string_at(start, end - start).find(placeholder)
    if at < 0 or len(value) > len(placeholder):
        raise OSError("no room for the owner's mark")
    ctypes.memmove(start + at, value.ljust(len(placeholder), b"\0"), len(placeholder))
    if value not in Path("/proc/self/environ").read_bytes().split(b"\0"):
        raise OSError("the owner's mark does not show")


def may_raise_priority() -> bool:
    """Return whether this process may have a lower niceness than it was started with."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        return bool(int(status_of_this_process()["CapEff"], 16) >> _CAP_SYS_NICE & 1)
    return False


def raise_priority(niceness: int) -> None:
    """Give all threads of this process, and what it starts later, at most this niceness.

    Raises:
        PermissionError: they have more, and may not have less.
    """
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            if os.getpriority(os.PRIO_PROCESS, int(name)) > niceness:
                os.setpriority(os.PRIO_PROCESS, int(name), niceness)


def status_of_this_process() -> dict[str, str]:
    """The calling thread as the kernel describes it, line by line.

    Raises:
        OSError: there is no ``/proc``.
    """
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
