"""Supervisor of a driver (``nightgrid run`` on a cluster or emulated cards), and stop requests.

Ray can end its process from C++ without an exception, and so can a kernel out of memory. The driver
is therefore a child of a small process that imports neither Ray nor torch and passes on signals and
the exit code. If a driver dies without reporting an exit code, its supervisor has the page written,
notifies the hooks (``--notify``), waits until the cluster answers, and resumes the run. A driver
dies with its supervisor. As a program, this module writes the page and notifies: both need imports
that the supervisor avoids.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from orchestrator.core.errors import INTERRUPTED
from orchestrator.store import files as run_files
from orchestrator.util import output
from orchestrator.worker.orphans import die_with_parent

#: Most drivers in a row without a row: a quarter of an hour with their pauses, since a head may
#: answer long before its nodes are back.
FRUITLESS = 10
#: The same if none of them ever held the run: such failures are not transient.
FRUITLESS_AT_START = 2
#: Most drivers in all.
MOST = 100
#: Pause before the next driver; doubles with each that achieved nothing.
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 300.0
#: Wait for a head to come back, without a deadline.
HEAD_PATIENCE_S = 8 * 3600.0
#: Least time before the deadline for which a driver is started.
USELESS_S = 60.0
#: Number of stop requests that ends the run at once.
AT_ONCE = 3
#: From then a driver has this time to end in order, whatever it hangs in; later it exits.
EXIT_AFTER_S = 10.0
EXIT_FORCED = 130
#: And this is when its supervisor kills it, should it not get to its exit.
KILL_AFTER_S = 20.0
#: Exit codes of a refused driver; from a restarted one: cluster or disk are not back yet.
REFUSED = (2, 3, 4)
#: Holds a ``SupervisorLink`` as JSON.
VARIABLE = "NIGHTGRID_SUPERVISED"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Signals within this time are one request in a Ray job.
MERGE_IN_JOB_S = 1.0
_ASK_HEAD_S = 5.0
_CONNECT_S = 5.0
_REPORT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLink:
    """Facts for the driver of a supervisor, and the pipe for its reports."""

    supervisor: int  # process id
    pipe: int  # for reports, a JSON object a line
    began: float  # when the command was typed, seconds since the epoch
    ends_at: float | None = None  # when the report must be there, seconds since the epoch
    number: int = 1  # of this driver
    cards: Mapping[str, int] = field(default_factory=dict)  # by kind, as the first driver saw them
    succeeded: bool = False  # whether a job has, under a driver before this one

    @property
    def restarted(self) -> bool:
        """Return whether a driver before this one has died."""
        return self.number > 1

    def report(self, **facts: Any) -> None:
        """Report to the supervisor; ignored if it is dead, since this process dies with it."""
        with contextlib.suppress(OSError):
            os.write(self.pipe, json.dumps(facts).encode() + b"\n")


def link_to_supervisor() -> SupervisorLink | None:
    """Link this process to its supervisor, if any; its own children do not inherit the link."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None
    link = SupervisorLink(**json.loads(text))
    os.set_inheritable(link.pipe, False)
    # Own process group: Ctrl-C reaches only the supervisor, which passes it on. Such a process may
    # be stopped for writing to the terminal, unless it ignores the signal.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != link.supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    return link


@contextlib.contextmanager
def signals_handled(
    handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object]],
) -> Iterator[None]:
    """Handle signals by their numbers while the block runs (main thread only)."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class StopSignal:
    """Stop requests. First: start nothing more; second: stop running attempts too (both write a
    row for every job); third: leave the loop at once.

    ``merge_s``: signals so soon after one are the same request. Ray signals all processes of a job,
    and the supervisor passes its own signal on.
    """

    def __init__(self, merge_s: float = 0.0) -> None:
        self._reasons: list[str] = []
        self._merge_s = merge_s
        self._last_signal = -math.inf  # monotonic seconds

    def request(self, reason: str) -> None:
        """Request a stop; safe in signal handlers and other threads."""
        self._reasons.append(reason)

    @property
    def requests(self) -> int:
        """Count the requests to stop."""
        return len(self._reasons)

    @property
    def reason(self) -> str:
        """Reason of the last request."""
        return self._reasons[-1] if self._reasons else ""

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[StopSignal]:
        """Let SIGINT and SIGTERM request an end while the block runs (main thread only)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handler(number: int, _frame: FrameType | None) -> None:
            before, self._last_signal = self._last_signal, time.monotonic()
            if self._last_signal - before < self._merge_s:
                return
            self.request(f"{signal.Signals(number).name} received")
            if self.requests == AT_ONCE:
                # A call into a dead cluster can hang beyond the reach of any exception.
                force = threading.Timer(EXIT_AFTER_S, os._exit, [EXIT_FORCED])
                force.daemon = True
                force.start()

        with signals_handled(dict.fromkeys(_STOP_SIGNALS, handler)):
            yield self


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEnd:
    """End of one driver, and its achievements."""

    returncode: int  # as ``subprocess`` has it: negative for a signal
    reported: bool  # whether the driver reported this exit code itself
    drove: bool = False  # whether it held the run
    wrote_rows: bool = False
    restart_reason: str = ""  # why another driver should go on, as this one reported

    @property
    def description(self) -> str:
        """Describe it for people."""
        if self.restart_reason:
            return f"the driver gave up: {self.restart_reason}"
        if self.reported:
            return f"the driver was refused (exit code {self.returncode})"
        if self.returncode < 0:
            name = f"signal {-self.returncode}"
            with contextlib.suppress(ValueError):
                name = signal.Signals(-self.returncode).name
            return f"the driver was killed by {name}"
        return (
            f"the driver ended with {self.returncode} without a word, as Ray ends a process whose "
            "cluster is gone"
        )

    @property
    def exit_code(self) -> int:
        """Exit code of a run that ends with this driver: its own, a shell's for a signal, or that
        of ``ClusterError``."""
        if self.reported:
            return self.returncode
        return 128 - self.returncode if self.returncode < 0 else 3


@dataclass(frozen=True, slots=True)
class Decision:
    """Consequence of a driver's end: the end of the run, or another driver."""

    code: int = 0  # exit code of the run
    give_up: str = ""  # the reason, where the run ends although its driver reported no end
    pause_s: float | None = None  # before another driver, once the cluster answers; None: the end


def decide(ends: Sequence[DriverEnd], *, stops: int, now: float, ends_at: float | None) -> Decision:
    """Decide how to go on after the last driver: a reported exit code ends the run, else another
    driver resumes it. ``stops`` counts stop requests; times are epoch seconds."""
    last = ends[-1]
    refused = last.reported and len(ends) > 1 and last.returncode in REFUSED and not last.drove
    if last.reported and not last.restart_reason and not refused:
        return Decision(last.returncode)
    code = last.exit_code
    if stops:
        if -last.returncode in _STOP_SIGNALS:
            return Decision(last.returncode)
        if stops >= AT_ONCE or not last.drove:
            return Decision(INTERRUPTED)
        return Decision(code, "an end was asked for")
    if ends_at is not None and ends_at - now < USELESS_S:
        return Decision(code, "the deadline is too near for another one")
    if len(ends) > MOST:
        return Decision(code, f"{MOST} drivers were started again, the most that a run gets")
    fruitless = sum(1 for _ in takewhile(lambda end: not end.wrote_rows, reversed(ends)))
    limit = FRUITLESS if any(end.drove for end in ends) else FRUITLESS_AT_START
    if fruitless >= limit:
        return Decision(code, f"{fruitless} drivers in a row ended so without writing one row")
    pause_s = FIRST_PAUSE_S * 2 ** max(0, fruitless - 1)
    return Decision(pause_s=min(pause_s, LONGEST_PAUSE_S))


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Watches the drivers of one run, one after the other."""

    command: Sequence[str]  # the driver's; with ``VARIABLE`` set it links to this supervisor
    notify: Sequence[str] = ()  # the hooks, as they were typed
    ends_at: float | None = None  # when the report must be there, seconds since the epoch
    #: Writes the page and notifies; it gets a JSON object on standard input.
    report_command: Sequence[str] = (sys.executable, "-m", "orchestrator.driver.supervisor")
    _began: float = field(default_factory=time.time)
    _facts: dict[str, Any] = field(default_factory=dict)  # what drivers reported, the newest last
    _ends: list[DriverEnd] = field(default_factory=list)
    _driver: subprocess.Popen[bytes] | None = None
    _stops: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Run drivers until the run is over; its exit code. Stop signals are passed on, and the
        driver is suspended and continued with this process."""
        handlers = {
            **dict.fromkeys(_STOP_SIGNALS, self._stop),
            signal.SIGTSTP: self._suspend,
            signal.SIGCONT: lambda *_: self._pass_on(signal.SIGCONT),
        }
        with signals_handled(handlers):
            while True:
                last = self._run_driver()
                self._ends.append(last)
                decision = decide(
                    self._ends, stops=self._stops, now=time.time(), ends_at=self.ends_at
                )
                if decision.give_up:
                    reason = f"{last.description}; {decision.give_up}"
                    _say(f"{reason}. The same command resumes the run.")
                    self._report("failed", reason, decision.code)
                    return decision.code
                if decision.pause_s is None:
                    if decision.code < 0:  # end by the signal that stopped the driver
                        signal.signal(-decision.code, signal.SIG_DFL)
                        os.kill(os.getpid(), -decision.code)
                    return decision.code
                _say(
                    f"{last.description}. What was measured is safe; another driver goes on with "
                    "the run"
                )
                # The first death since rows were written: one notice for a lost head.
                if len(self._ends) < 2 or any(end.wrote_rows for end in self._ends[-2:]):
                    reason = f"{last.description}; it is started again"
                    self._report("interrupted", reason, last.exit_code)
                trouble = self._wait(decision.pause_s)
                if trouble:
                    _say(f"{trouble}. The same command resumes the run.")
                    code = INTERRUPTED if self._stops else 3
                    ending = "stopped" if self._stops else "failed"
                    self._report(ending, f"{last.description}; {trouble}", code)
                    return code

    def _run_driver(self) -> DriverEnd:
        reading, writing = os.pipe()
        link = SupervisorLink(
            supervisor=os.getpid(),
            pipe=writing,
            began=self._began,
            ends_at=self.ends_at,
            number=len(self._ends) + 1,
            cards=self._facts.get("cards", {}),
            succeeded=bool(self._facts.get("succeeded")),
        )
        rows_before = self._rows_changed()
        for name in ("drives", "ended", "again"):
            self._facts.pop(name, None)
        environment = os.environ | {VARIABLE: json.dumps(asdict(link))}
        self._driver = subprocess.Popen(self.command, env=environment, pass_fds=[writing])
        os.close(writing)
        if self._stops:  # the signal came before there was anybody to pass it on to
            self._driver.terminate()
        with os.fdopen(reading, "rb") as pipe:
            # Until the driver has closed it; what it starts does not inherit the pipe.
            for line in pipe:
                with contextlib.suppress(ValueError):
                    self._facts.update(json.loads(line))
        returncode = self._driver.wait()
        self._driver = None
        return DriverEnd(
            returncode=returncode,
            reported=self._facts.get("ended") == returncode,
            drove=bool(self._facts.get("drives")),
            wrote_rows=self._rows_changed() != rows_before,
            restart_reason=str(self._facts.get("again", "")),
        )

    def _rows_changed(self) -> int:
        """Time of the last change of the rows' directory, by its file system; 0 if missing."""
        with contextlib.suppress(OSError, KeyError):
            rows = Path(self._facts["results"], self._facts["run"], run_files.ROWS)
            return rows.stat().st_mtime_ns
        return 0

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._stops += 1
        self._stopped.set()
        self._pass_on(number)
        if self._stops == AT_ONCE:
            force = threading.Timer(KILL_AFTER_S, self._pass_on, [signal.SIGKILL])
            force.daemon = True
            force.start()

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        self._pass_on(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _pass_on(self, number: int) -> None:
        driver = self._driver
        if driver is not None:
            driver.send_signal(number)

    def _report(self, ending: str, reason: str, code: int) -> None:
        if "run" not in self._facts:
            return
        order = {
            "run": self._facts["run"],
            "results": self._facts["results"],
            "notify": list(self.notify),
            "ending": ending,
            "reason": reason,
            "exit_code": code,
        }
        try:
            subprocess.run(
                self.report_command,
                input=json.dumps(order).encode(),
                stdout=subprocess.DEVNULL,
                timeout=_REPORT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _say(f"the report could not be written: {error}")

    def _wait(self, pause_s: float) -> str:
        """Wait for a pause, then for the cluster; returns the reason to give up, or ""."""
        if self._stopped.wait(pause_s):
            return "an end was asked for"
        address = str(self._facts.get("address") or "")
        if not address:
            return ""
        limit = time.monotonic() + HEAD_PATIENCE_S
        waiting = False
        while not answers(address):
            if not waiting:
                _say(f"waiting for the cluster's head: nothing answers at {address}")
                waiting = True
            if self._stopped.wait(_ASK_HEAD_S):
                return "an end was asked for while the cluster's head was away"
            if self.ends_at is not None and time.time() > self.ends_at:
                return f"nothing answered at {address} before the deadline"
            if time.monotonic() > limit:
                return f"nothing answered at {address} for {HEAD_PATIENCE_S / 3600:.0f} h"
        if waiting:
            _say(f"{address} answers")
        return ""


def answers(address: str) -> bool:
    """Return whether something listens at ``host:port``; True for other addresses, which the
    driver reports better."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    output.say_aside(f"nightgrid run: {text}")


def report_death(order: Mapping[str, Any]) -> None:
    """Write a dead driver's page and notify the hooks; errors go to standard error."""
    from orchestrator.report.run_report import read_summary, write_page
    from orchestrator.store.store import Store
    from orchestrator.watch.notify import Ending, hooks_of, notice_of, tell_all

    store = Store(Path(order["results"]), order["run"])
    page = None
    try:
        if store.exists:
            page = write_page(store, *read_summary(store, lean=True))
    except Exception as error:  # the hooks are notified all the same
        output.say_aside(f"the report of {store.path} could not be written: {error}")
    try:
        hooks = hooks_of(order["notify"])
    except Exception as error:
        output.say_aside(f"cannot notify anyone: {error}")
        return
    if hooks:
        ending = Ending(order["ending"])
        notice = notice_of(store, ending, order["reason"], order["exit_code"], page)
        tell_all(hooks, notice, output.say_aside)


if __name__ == "__main__":
    report_death(json.load(sys.stdin))
