"""The process that watches a driver: ``nightgrid run`` on a cluster or on emulated cards.

Ray can end the process that uses it, from C++, without an exception; so can a kernel that is out of
memory. The driver is therefore a child of a small process that imports neither Ray nor torch. It
passes signals and the exit code on. When a driver dies without a word it has what was measured
reported, tells who asked (``--notify``), waits until the cluster answers, and starts the same
command again, which goes on with the run. ``supervisor.py`` decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from orchestrator.core.errors import INTERRUPTED
from orchestrator.host import output
from orchestrator.results import paths

# Restart policy for a driver that died, with its reasons.
#
# A driver that ends with an exit code of its own has had its say. One that was killed, or that Ray
# ended from C++, has not: its rows are safe, its jobs are not done, and the same command goes on.

#: Drivers in a row that end without having written one row. With the pauses between them these are
#: a quarter of an hour: a head may answer long before its nodes, or this host's own, are back.
FRUITLESS = 10
#: The same where none of them ever held the run: what kills them at their start is no accident.
FRUITLESS_AT_START = 2
#: In all: a night of crashes is one to look at, not to go on with.
MOST = 100
#: The pause before the next driver doubles with each that achieved nothing.
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 300.0
#: For a head to come back, when no deadline says otherwise: a night.
HEAD_PATIENCE_S = 8 * 3600.0
#: With less time than this before the deadline, a driver would do nothing but start and stop.
USELESS_S = 60.0
#: From so many requests on, an end is not an orderly one.
AT_ONCE = 3
_ASKING = (signal.SIGINT, signal.SIGTERM)
#: Exit codes of a driver that was refused (grid, cluster, results): of one that was started again,
#: they say that the cluster or the disk is not back yet, since the first one was not refused.
REFUSED = (2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One driver, from its start to its end."""

    returncode: int  # as ``subprocess`` has it: negative for a signal
    own_end: bool  # whether it said that this is its exit code
    drove: bool = False  # whether it held the run
    wrote_rows: bool = False
    why_again: str = ""  # what it said itself of why another driver should go on

    @property
    def fate(self) -> str:
        """Describe its end, for people."""
        if self.why_again:
            return f"the driver gave up: {self.why_again}"
        if self.own_end:
            return f"the driver was refused (exit code {self.returncode})"
        if self.returncode < 0:
            return f"the driver was killed by {_signal_name(-self.returncode)}"
        return (
            f"the driver ended with {self.returncode} without a word, as Ray ends a process whose "
            "cluster is gone"
        )


@dataclass(frozen=True, slots=True)
class Return:
    """The run is over, with this exit code."""

    code: int


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Another driver goes on after a pause, once the cluster answers."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run ends without its driver's say."""

    code: int
    reason: str


def decide(
    lives: Sequence[Life], *, stops: int, now: float, ends_at: float | None
) -> Return | StartAgain | GiveUp:
    """Decide how to go on now that the last of these drivers has ended.

    Args:
        stops: how often somebody asked for an end (Ctrl-C, SIGTERM).
        now: seconds since the epoch.
        ends_at: when the report must be there, if somebody said so.
    """
    last = lives[-1]
    refused = last.own_end and len(lives) > 1 and last.returncode in REFUSED and not last.drove
    if last.own_end and not last.why_again and not refused:
        return Return(last.returncode)
    code = exit_code(last)
    if stops:
        if -last.returncode in _ASKING:
            return Return(last.returncode)
        if stops >= AT_ONCE or not last.drove:
            return Return(INTERRUPTED)
        return GiveUp(code, "an end was asked for")
    if ends_at is not None and ends_at - now < USELESS_S:
        return GiveUp(code, "the deadline is too near for another one")
    if len(lives) > MOST:
        return GiveUp(code, f"{MOST} drivers were started again, the most that a run gets")
    fruitless = 0
    for life in reversed(lives):
        if life.wrote_rows:
            break
        fruitless += 1
    began = any(life.drove for life in lives)
    if fruitless >= (FRUITLESS if began else FRUITLESS_AT_START):
        return GiveUp(code, f"{fruitless} drivers in a row ended so without writing one row")
    pause_s = FIRST_PAUSE_S * 2 ** max(0, fruitless - 1)
    return StartAgain(pause_s=min(pause_s, LONGEST_PAUSE_S))


def exit_code(life: Life) -> int:
    """The exit code of a run that ends with this driver: its own, that of a shell for a signal, or
    that there is no usable cluster."""
    if life.own_end:
        return life.returncode
    return 128 - life.returncode if life.returncode < 0 else 3


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The driver's side of its supervisor (``supervisor.py``): the messages in both directions.
#
# A driver learns from one environment variable that it has a supervisor, and says over a pipe which
# run it drives and that an exit code is its own. It dies with its supervisor, as everything that a
# driver starts dies with the driver: whoever kills the process that was typed has killed the run.

#: Holds a ``Charge`` as JSON.
VARIABLE = "NIGHTGRID_SUPERVISED"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Facts that a supervisor tells its driver."""

    supervisor: int  # process id
    pipe: int  # where to tell facts, a JSON object a line
    began: float  # when the command was typed, seconds since the epoch
    ends_at: float | None = None  # when the report must be there, seconds since the epoch
    life: int = 1  # the number of this driver
    cards: Mapping[str, int] = field(default_factory=dict)  # by kind, as the first driver saw them
    succeeded: bool = False  # whether a job has, under a driver before this one

    @property
    def again(self) -> bool:
        """Return whether a driver before this one has died."""
        return self.life > 1

    def variables(self) -> dict[str, str]:
        """Variables for the driver's environment."""
        return {VARIABLE: json.dumps(asdict(self))}

    def tell(self, **facts: Any) -> None:
        """Tell the supervisor something. It may be dead, and then this process is soon."""
        with contextlib.suppress(OSError):
            os.write(self.pipe, json.dumps(facts).encode() + b"\n")


def take_charge() -> Charge | None:
    """Become the driver of a supervisor, if this process was started as one. What it starts itself
    does not learn of it."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None
    charge = Charge(**json.loads(text))
    os.set_inheritable(charge.pipe, False)
    # A group of its own: the terminal's Ctrl-C reaches the supervisor, who passes each one on. Such
    # a process may be stopped for writing to the terminal, unless it ignores the signal.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != charge.supervisor:
        os.kill(os.getpid(), signal.SIGKILL)
    return charge


#: A driver that is asked for the third time ends by itself within ten seconds (``loop.py``).
FORCE_AFTER_S = 20.0
_ASK_HEAD_S = 5.0
_CONNECT_S = 5.0
_AFTERMATH_S = 600.0


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Watches the drivers of one run, one after the other.

    Attributes:
        command: the driver's; with ``VARIABLE`` set it takes charge.
        notify: the hooks, as they were typed.
        ends_at: when the report must be there, seconds since the epoch.
        aftermath: the command that reports and notifies; it gets a JSON object on standard input.
    """

    command: Sequence[str]
    notify: Sequence[str] = ()
    ends_at: float | None = None
    aftermath: Sequence[str] = (sys.executable, "-m", "orchestrator.driver.supervisor")
    _began: float = field(default_factory=time.time)
    _facts: dict[str, Any] = field(default_factory=dict)  # what drivers told, the newest last
    _lives: list[Life] = field(default_factory=list)
    _driver: subprocess.Popen[bytes] | None = None
    _stops: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Run drivers until one has had its say; its exit code."""
        with self._signals():
            while True:
                self._lives.append(self._live())
                decision = decide(
                    self._lives, stops=self._stops, now=time.time(), ends_at=self.ends_at
                )
                if isinstance(decision, Return):
                    return self._as_it_ended(decision.code)
                fate = self._lives[-1].fate
                if isinstance(decision, GiveUp):
                    _say(f"{fate}; {decision.reason}. The same command resumes the run.")
                    self._report("failed", f"{fate}; {decision.reason}", decision.code)
                    return decision.code
                _say(f"{fate}. What was measured is safe; another driver goes on with the run")
                if self._is_news():
                    self._report("interrupted", f"{fate}; it is started again", None)
                trouble = self._wait(decision.pause_s)
                if trouble:
                    _say(f"{trouble}. The same command resumes the run.")
                    code = INTERRUPTED if self._stops else 3
                    ending = "stopped" if self._stops else "failed"
                    self._report(ending, f"{fate}; {trouble}", code)
                    return code

    # ------------------------------------------------------------ one driver

    def _live(self) -> Life:
        """Start a driver and wait for its end."""
        reading, writing = os.pipe()
        charge = Charge(
            supervisor=os.getpid(),
            pipe=writing,
            began=self._began,
            ends_at=self.ends_at,
            life=len(self._lives) + 1,
            cards=self._facts.get("cards", {}),
            succeeded=bool(self._facts.get("succeeded")),
        )
        rows_before = self._rows_changed()
        for known in ("drives", "ended", "again"):
            self._facts.pop(known, None)
        self._driver = subprocess.Popen(
            self.command, env=os.environ | charge.variables(), pass_fds=[writing]
        )
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
        return Life(
            returncode=returncode,
            own_end=self._facts.get("ended") == returncode,
            drove=bool(self._facts.get("drives")),
            wrote_rows=self._rows_changed() != rows_before,
            why_again=str(self._facts.get("again", "")),
        )

    def _as_it_ended(self, code: int) -> int:
        """The exit code; a signal that ended the driver, as it was asked to, ends this process."""
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        return code

    def _rows_changed(self) -> int:
        """Time at which a file of rows last came or went, as the file system counts; 0 if there is
        none."""
        with contextlib.suppress(OSError, KeyError):
            return os.stat(Path(self._facts["results"], self._facts["run"], paths.ROWS)).st_mtime_ns
        return 0

    # ------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass on what asks for an end, and be stopped and continued together with the driver."""
        handlers = {
            signal.SIGINT: self._stop,
            signal.SIGTERM: self._stop,
            signal.SIGTSTP: self._suspend,
            signal.SIGCONT: self._continue,
        }
        before = {number: signal.signal(number, act) for number, act in handlers.items()}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._stops += 1
        self._stopped.set()
        self._pass_on(number)
        if self._stops == AT_ONCE:
            force = threading.Timer(FORCE_AFTER_S, self._pass_on, [signal.SIGKILL])
            force.daemon = True
            force.start()

    def _suspend(self, _number: int, _frame: FrameType | None) -> None:
        self._pass_on(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _continue(self, _number: int, _frame: FrameType | None) -> None:
        self._pass_on(signal.SIGCONT)

    def _pass_on(self, number: int) -> None:
        driver = self._driver
        if driver is not None:
            driver.send_signal(number)

    # ------------------------------------------------------------ between two drivers

    def _is_news(self) -> bool:
        """Return whether the last driver's death is the first since rows were written: the user is
        told once of a head that is away, not of each driver that does not find it."""
        before = self._lives[-2:-1]
        return not before or before[0].wrote_rows or self._lives[-1].wrote_rows

    def _report(self, ending: str, reason: str, code: int | None) -> None:
        """Have the page written and the hooks told, by a process of its own: both need what this
        one does not import. A failure of it is said by itself."""
        if "run" not in self._facts:
            return
        told = {
            "run": self._facts["run"],
            "results": self._facts["results"],
            "notify": list(self.notify),
            "ending": ending,
            "reason": reason,
            "exit_code": exit_code(self._lives[-1]) if code is None else code,
        }
        try:
            subprocess.run(
                self.aftermath,
                input=json.dumps(told).encode(),
                stdout=subprocess.DEVNULL,
                timeout=_AFTERMATH_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            _say(f"the report could not be written: {error}")

    def _wait(self, pause_s: float) -> str:
        """Wait for a pause, then for the cluster to answer; why there is no point in going on, if
        there is none."""
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
    """Return whether something listens at ``host:port``; anything else is taken for an answer,
    since a driver says best what is wrong with it."""
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


# Work that is left after a driver died without a message: its report, and its notification.
#
# ``python -m orchestrator.driver.supervisor`` is started by the supervisor, with a JSON object on
# standard input. It says on standard error what went wrong, and raises nothing.


def settle(told: dict[str, Any]) -> None:
    """Write the page of what was measured, and tell the hooks."""
    from orchestrator.report import read_summary, write_page
    from orchestrator.results.store import Store
    from orchestrator.watching.notice import Ending
    from orchestrator.watching.notify import hooks_of, notice_of_death, tell_all

    store = Store.open(Path(told["results"]), told["run"])
    page = None
    try:
        if store.exists:
            page = write_page(store, *read_summary(store, lean=True))
    except Exception as error:  # who asked is told all the same
        output.say_aside(f"the report of {store.path} could not be written: {error}")
    try:
        hooks = hooks_of(told["notify"])
    except Exception as error:
        output.say_aside(f"cannot notify anyone: {error}")
        return
    if hooks:
        ending = Ending(told["ending"])
        notice = notice_of_death(store, ending, told["reason"], told["exit_code"], page)
        tell_all(hooks, notice, output.say_aside)


if __name__ == "__main__":
    settle(json.load(sys.stdin))
