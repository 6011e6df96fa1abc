"""A process that outlives pytest and ends whatever the tests started, however pytest ends.

Fixtures clean up when pytest lets them; killed, it does not, and a Ray head would listen on. The
guardian is told the id of pytest's process and a mark that all which tests start inherits in its
environment. As long as pytest lives it notes once a second what descends from it, since a process
may overwrite its environment (setproctitle does) or be given another one, and leave its parent.
When pytest is gone, all that is marked, noted, or descends from either is killed, until nothing of
it is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

VARIABLE = "MARK_OF_NIGHTGRID_TESTS"
_NOTE_EVERY_S = 1.0
_END_S = 60.0
#: Looks for the mark in one process; more of them would cost a hundredth of a core.
_LOOKS, _MARKED = 5, -1

#: A process id comes back one day, with another start.
Identity = tuple[int, str]


def guard_this_process() -> None:
    """Start the guardian of this process and mark what it will start (Linux only)."""
    if not os.path.isdir("/proc/self"):
        return
    mark = secrets.token_hex(8)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    # A session within a session has both marks, so that the outer guardian ends its processes too.
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')}:{mark}"
    subprocess.run(  # returns when the guardian has left it and is nobody's child
        [sys.executable, "-S", __file__, str(os.getpid()), mark],
        env=environment,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@dataclass(slots=True)
class _Seen:
    identity: Identity
    parent: int
    zombie: bool


@dataclass(slots=True)
class Guardian:
    pytest: Identity
    mark: bytes
    noted: set[Identity] = field(default_factory=set)
    looked_at: dict[Identity, int] = field(default_factory=dict)  # how often for the mark, in vain

    def note(self) -> list[int]:
        """Note what belongs to the tests now; the ids of those that are there, without pytest."""
        table = _processes()
        here = os.getpid()
        ours = {
            pid for pid, seen in table.items() if seen.identity in self.noted or self._marked(seen)
        }
        if pytest := table.get(self.pytest[0]):
            ours |= {pytest.identity[0]} if pytest.identity == self.pytest else set()
        children: dict[int, list[int]] = {}
        for pid, seen in table.items():
            children.setdefault(seen.parent, []).append(pid)
        todo = list(ours)
        while todo:
            fresh = set(children.get(todo.pop(), ())) - ours
            ours |= fresh
            todo += fresh
        ours -= {here, self.pytest[0]}
        self.noted |= {table[pid].identity for pid in ours}
        there = {seen.identity for seen in table.values()}
        self.noted &= there
        self.looked_at = {key: value for key, value in self.looked_at.items() if key in there}
        return [pid for pid in ours if not table[pid].zombie]

    def _marked(self, seen: _Seen) -> bool:
        """Return whether a process has inherited the mark; the young are asked again, who may be
        between their fork and their program."""
        looks = self.looked_at.get(seen.identity, 0)
        if 0 <= looks < _LOOKS:
            looks += 1
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{seen.identity[0]}/environ", "rb") as file,
            ):
                looks = _MARKED if self.mark in file.read() else looks
            self.looked_at[seen.identity] = looks
        return looks == _MARKED

    def end_all(self) -> None:
        """Kill what belongs to the tests until nothing of it is there twice in a row."""
        deadline = time.monotonic() + _END_S
        nothing = 0
        while nothing < 2 and time.monotonic() < deadline:
            left = self.note()
            nothing = 0 if left else nothing + 1
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _processes() -> dict[int, _Seen]:
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                table[int(name)] = _read(int(name))
    return table


def _read(pid: int) -> _Seen:
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    return _Seen((pid, words[19].decode()), int(words[1]), words[0] in b"ZX")


def _watch(pytest: int, mark: str) -> None:
    guardian = Guardian(pytest=_read(pytest).identity, mark=mark.encode())
    poll = select.poll()
    if hasattr(os, "pidfd_open"):
        poll.register(os.pidfd_open(pytest), select.POLLIN)
    while not poll.poll(_NOTE_EVERY_S * 1000):
        try:
            seen = _read(pytest)
        except OSError:
            break
        if seen.zombie or seen.identity != guardian.pytest:
            break
        guardian.note()
    guardian.end_all()


def main() -> None:
    pytest, mark = int(sys.argv[1]), sys.argv[2]
    if os.fork():
        os._exit(0)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    os.chdir("/")
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        _watch(pytest, mark)


if __name__ == "__main__":
    main()
