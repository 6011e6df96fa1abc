"""Faults that hit files of a run: garbage, links that lead out of it, and copies of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos_drivers import RUN, Drivers
from chaos_faults import Injector
from chaos_plan import Fault

_REFUSED = 4
#: How long another driver may work on a copy, from the moment when its run has an id.
_COPY_S = 12.0
_COPY_STARTS_WITHIN_S = 60.0
LINKS_STAY_S = 45.0
_LEAVES_WITHIN_S = 60.0
#: What a lock or a status may be found to hold.
GARBAGE = (
    b"",
    b"\0" * 300,
    b'{"host": "',
    b"[" * 6000,
    b'{"pid": ' + b"9" * 5000 + b"}",
    b'{"run": null, "cards": [null], "total": -1, "at": 1e999}',
    b"\xff\xfe\x1b[2J\x1b]0;taken\x07",
)


class Canaries:
    """Files and names outside of the run, which nothing may write or make."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        for number in range(3):
            (directory / f"canary-{number}").write_text(f"not yours, {number}\n" * 50)
        self._before = self._state()

    @property
    def targets(self) -> list[Path]:
        """Targets of a planted link: to a file, and to a name that is not taken."""
        return [*sorted(self.directory.glob("canary-*")), self.directory / "nowhere"]

    def harmed(self) -> list[str]:
        now = self._state()
        return [
            f"outside the run: {name}: {self._before.get(name, 'not there')} "
            f"-> {now.get(name, 'gone')}"
            for name in sorted(self._before.keys() | now.keys())
            if self._before.get(name) != now.get(name)
        ]

    def _state(self) -> dict[str, str]:
        return {
            path.name: f"{path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
            for path in self.directory.iterdir()
        }


@dataclass(slots=True, kw_only=True)
class FileFaults:
    """Injects faults into files; ``problems`` are what did not hold at once."""

    drivers: Drivers
    injector: Injector
    canaries: Canaries
    copies: Path  # directory for copies of the run
    random: random.Random
    problems: list[str] = field(default_factory=list)
    copied: int = 0
    refused: int = 0  # rivals

    def acts(self) -> dict[str, object]:
        return {
            "start a second driver": self.start_a_second_driver,
            "open a copied run": self.open_a_copy,
            "plant symlinks": self.plant_symlinks,
            "corrupt the lock": self.corrupt_the_lock,
            "corrupt the status": self.corrupt_the_status,
        }

    # ------------------------------------------------------------ another driver

    def start_a_second_driver(self) -> Fault | None:
        """It must be refused at once, and told who holds the run."""
        pid = self.drivers.working_pid()
        if pid is None:
            return None
        fault = Fault(kind="start a second driver", at=time.time(), pid=pid)
        done = self._rival("a second driver", pid)
        if done is None or self.drivers.working_pid() != pid:
            return fault  # the first has just ended, so it was none too many
        if done.returncode == _REFUSED and f"held by process {pid} on " in done.stderr:
            self.refused += 1
            fault.note = "refused"
        else:
            self.problems.append(f"a second driver: {done.returncode}: {done.stderr[-500:]}")
        return fault

    def corrupt_the_lock(self) -> Fault | None:
        """While the lock cannot be read, nobody can know that the run is free: refused, with its
        path. The driver that has it goes on."""
        lock = self.drivers.run / "driver.lock"
        pid = self.drivers.working_pid()
        if pid is None or self._disk_is_full():
            return None
        sound = lock.read_bytes()
        fault = Fault(kind="corrupt the lock", at=time.time(), pid=pid)
        garbage = self.random.choice(GARBAGE)
        _overwrite(lock, garbage)
        done = self._rival("a driver that met a garbled lock", pid)
        is_there = _holds(lock, garbage)
        if done is not None and is_there:
            said = f"{done.returncode}: {done.stderr[-500:]}"
            if done.returncode != _REFUSED or lock.name not in done.stderr:
                self.problems.append(f"a garbled lock was not refused: {said}")
        if is_there:  # else the driver has just ended, and another one may have the run
            with contextlib.suppress(FileNotFoundError):
                _overwrite(lock, sound)
        fault.until = time.time()
        return fault

    def _rival(self, who: str, pid: int) -> subprocess.CompletedProcess | None:
        """The end of another driver; None if it got the run, as it may once process ``pid`` is
        gone."""
        holder = psutil.Process(pid) if psutil.pid_exists(pid) else None
        try:
            done = self.drivers.rival()
        except subprocess.TimeoutExpired:
            self.problems.append(f"{who} was not refused in 90 s")
            return None
        if done is None and holder is not None:
            try:
                holder.wait(_LEAVES_WITHIN_S)  # it gives its run back, then leaves its cluster
            except psutil.TimeoutExpired:
                self.problems.append(f"{who} got the run beside driver {pid}")
        if done is not None and "Traceback" in done.stderr:
            self.problems.append(f"{who}: {done.stderr[-1500:]}")
        return done

    def open_a_copy(self) -> Fault | None:
        """A driver on a copy of the run, on the same cluster, may touch nothing of the
        original's."""
        pid = self.drivers.working_pid()
        if pid is None or not self.injector.is_calm or self._disk_is_full():
            return None
        self.copied += 1
        home = self.copies / f"copy-{self.copied}"
        shutil.copytree(
            self.drivers.run,
            home / RUN,
            symlinks=True,
            ignore=shutil.ignore_patterns("driver.lock", ".driver.lock*", ".reserve", "*.aside"),
            copy_function=_copy_if_there,
        )
        before = (home / RUN / "run.id").read_bytes() if (home / RUN / "run.id").exists() else b""
        fault = Fault(kind="open a copied run", at=time.time())
        output = home / "driver.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self.drivers.command(results=home),
                env=self.drivers.cluster.environment(),
                cwd=home,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _COPY_STARTS_WITHIN_S
        told: list[float] = []

        def look() -> None:
            text = output.read_text(errors="replace")
            if not told and ("starting on " in text or "cards" in text):
                told.append(time.monotonic())
            ended = process.poll() is not None or time.monotonic() > deadline
            if not ended and not (told and time.monotonic() > told[0] + _COPY_S):
                self.injector.after(0.5, look)
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            fault.until = time.time()
            if "Traceback" in text:
                self.problems.append(f"the driver of a copied run: {text[-1500:]}")
            opened = "\nrows: " in text  # or it was refused before, as while the head is away
            if before and opened and (home / RUN / "run.id").read_bytes() == before:
                self.problems.append(f"a copy of the run kept its id: {home / RUN}")

        self.injector.after(0.5, look)
        return fault

    # ------------------------------------------------------------ garbage and links

    def corrupt_the_status(self) -> Fault | None:
        """Its driver is halted meanwhile: it would write the status anew within a second."""
        pid = self.drivers.working_pid()
        status = self.drivers.run / "status.json"
        if pid is None or not status.exists() or self._disk_is_full():
            return None
        fault = Fault(kind="corrupt the status", at=time.time(), pid=pid)
        os.kill(pid, signal.SIGSTOP)
        try:
            _overwrite(status, self.random.choice(GARBAGE))
            asked = ("status", RUN, "--results", str(self.drivers.results))
            done = self.drivers.nightgrid(*asked, timeout_s=60)
            if "Traceback" in done.stderr or "\x1b" in done.stdout + done.stderr:
                self.problems.append(f"nightgrid status: {done.returncode}: {done.stderr[-1500:]}")
        except subprocess.TimeoutExpired:
            self.problems.append("nightgrid status took more than 60 s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        fault.until = time.time()
        return fault

    def plant_symlinks(self) -> Fault | None:
        """Links at the names that logs and temporary files are given next."""
        pid = self.drivers.working_pid()
        if pid is None or self._disk_is_full():
            return None
        fault = Fault(kind="plant symlinks", at=time.time())
        run = self.drivers.run
        names = [run / f".{name}.{pid}.aside" for name in ("status.json", "begun.log", "grid.yaml")]
        names += [run / "report.html", *self._next_worker_logs()]
        planted = [name for name in names if self._plant(name)]
        fault.note = f"{len(planted)} links"

        def remove() -> None:
            for name in planted:
                if name.is_symlink():
                    name.unlink(missing_ok=True)

        return self.injector.lasting(fault, LINKS_STAY_S, remove)

    def _plant(self, name: Path) -> bool:
        target = self.random.choice(self.canaries.targets)
        for _ in range(20):  # the status is written every second
            with contextlib.suppress(OSError):
                name.symlink_to(target)
                return True
        return False

    def _next_worker_logs(self) -> list[Path]:
        directory, cluster = self.drivers.log_dir, self.drivers.cluster
        newest = max(self.drivers.log_dir.glob("*-HPU*.log"), key=_made_at, default=None)
        ending = re.search(r"-(\d+)\.log$", newest.name) if newest is not None else None
        if ending is None:
            return []
        node, first = self.random.choice(cluster.names), int(ending[1]) + 1
        return [
            directory / f"{node}-HPU{card}-{node}-HPU{card}-{number}.log"
            for card in range(cluster.cards)
            for number in range(first, first + 12)
        ]

    def _disk_is_full(self) -> bool:
        return self.injector.lasts("fill the disk", "fill the log's disk")


def _overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.write(data)
        file.truncate()


def _holds(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False


def _made_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _copy_if_there(source: str, target: str) -> None:
    """Copy a file of a run that lives: some of them come and go."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)
