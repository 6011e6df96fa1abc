"""The two ends of a contender: a process that does one turn of work each time it is told to.

A program under ``contenders/`` ends with ``serve(turn)`` when it is ready. This module needs
nothing but Python, so that programs in the peers' environment can use it. Answers are lines that
begin with ``MARK``; everything else that a library prints goes to the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = "@@ "
#: glibc keeps for the next step what one has freed: the product asks for that itself, so that all
#: contenders have it.
ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
}
#: A contender goes on so long before its turn begins: what it does by the clock, such as the
#: heartbeats of Ray, is then done.
_SETTLE_S = 0.2
#: That a contender may take to end: one that was told so by the end of its input, and one that is
#: ended because the benchmark is.
_LEAVE_S, _END_S = 60.0, 5.0


def exit_on_signals() -> None:
    """Have this process leave by ``SystemExit`` where Ctrl-C, SIGTERM or the loss of its terminal
    would end it, so that what it has started is ended on the way out. What it was started to ignore
    (by ``nohup``, or ``&`` of a script) stays ignored."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


# ---------------------------------------------------------------- in the contender


def serve(turn: Callable[[], Mapping[str, Any]]) -> None:
    """Tell that all is ready, then do a turn for each line of standard input.

    ``turn`` returns the work that it did (``work``) and anything else worth telling; wall time,
    CPU time and peak memory are added here unless it says them itself.
    """
    exit_on_signals()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(MARK + json.dumps({"ready": True}), file=out)
    for _ in sys.stdin:
        forget_peak()
        cpu, wall = time.process_time(), time.perf_counter()
        told = dict(turn())
        told.setdefault("wall_s", time.perf_counter() - wall)
        told.setdefault("cpu_s", time.process_time() - cpu)
        told["peak_bytes"] = peak_bytes()
        print(MARK + json.dumps(told), file=out)


def forget_peak() -> None:
    """Begin anew what ``peak_bytes`` tells."""
    with contextlib.suppress(OSError):  # the peak is then one of the whole life
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process has had resident since then."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


# ---------------------------------------------------------------- in the harness


class Contender:
    """A running contender. Several can start side by side: ``ready`` waits for one of them.

    While it waits for its turn it is stopped (SIGSTOP), with all processes of its session, so that
    it costs those whose turn it is nothing: 32 idle actors of Ray take a quarter of a core.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | os.PathLike[str]],
        log: Path,
        environment: Mapping[str, str] | None = None,
        patience_s: float = 900.0,
    ) -> None:
        self.name = name
        self.turns: list[dict[str, Any]] = []
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began = time.perf_counter()
        self.start_s: float | None = None  # from the start of its process until it is ready
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [os.fspath(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=os.environ | ALLOCATOR | {"PYTHONPATH": str(ROOT)} | dict(environment or {}),
                start_new_session=True,  # so that it ends with what it has started
            )

    def ready(self) -> float:
        """Wait until it is ready; the seconds from the start of its process."""
        if self.start_s is None:
            self._answer()
            self.start_s = time.perf_counter() - self._began
            self._signal_all(signal.SIGSTOP)
        return self.start_s

    def turn(self, *, counts: bool = True) -> dict[str, Any]:
        """Have it do its work once."""
        self.ready()
        assert self._process.stdin is not None
        self._signal_all(signal.SIGCONT)
        time.sleep(_SETTLE_S)
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        told = self._answer()
        self._signal_all(signal.SIGSTOP)
        if counts:
            self.turns.append(told)
        return told

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line[len(MARK) :]))
        tail = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-12:])
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}:\n{tail}")

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it; at once where the benchmark failed or is being ended itself."""
        assert self._process.stdin is not None
        try:
            self._signal_all(signal.SIGCONT)
            with contextlib.suppress(OSError):  # a turn that it never read
                self._process.stdin.close()
            if kind is not None:
                self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S if kind is None else _END_S)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: int) -> None:
        """Send a signal to it and to its process group, if anything of that is there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _signal_all(self, number: int) -> None:
        """Send a signal to all processes of its session, of whatever process group."""
        for process in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, OSError):  # no process, or none that is left
                if os.getsid(int(process.name)) == self._process.pid:
                    os.kill(int(process.name), number)


def take_turns(
    contenders: Sequence[Contender],
    turns: int,
    *,
    warm_ups: int = 0,
    fewer: Mapping[str, int] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Each contender's turns, by name. Who begins moves on from round to round, so that nobody
    always follows the same neighbour; those in ``fewer`` take part in so many first rounds."""
    for contender in contenders:
        contender.ready()
    for _ in range(warm_ups):
        for contender in contenders:
            contender.turn(counts=False)
    for number in range(turns):
        taking = [each for each in contenders if (fewer or {}).get(each.name, turns) > number]
        first = number % len(taking)
        for contender in (*taking[first:], *taking[:first]):
            contender.turn()
    return {contender.name: contender.turns for contender in contenders}
