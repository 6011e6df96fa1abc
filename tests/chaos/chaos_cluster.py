"""Real Ray nodes on this machine, each with a loopback address of its own, to be killed and started
again as servers are. Every process of it carries a mark, by which what is left over is found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from orchestrator.on_ray.cluster import new_token, ray_environment
from orchestrator.worker import cpu_slots

ROOT = Path(__file__).resolve().parents[2]
MARK = "NIGHTGRID_CHAOS"
_START_PATIENCE_S = 120.0


@dataclass
class ChaosCluster:
    """A head without cards and ``nodes`` emulated servers of ``cards`` HPU each."""

    nodes: int = 3
    cards: int = 8
    mark: str = field(default_factory=lambda: f"{os.getpid()}-{time.monotonic_ns()}")
    temp_dir: str = ""
    log_dir: Path | None = None  # of workers; None: Ray's own
    port: int = 0
    _token: dict[str, str | None] = field(default_factory=dict)  # the cluster's, as variables
    _ending: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)  # of each node, the last time
    _down: set[str] = field(default_factory=set)  # nodes that are to stay away for a while

    @property
    def address(self) -> str:
        return f"127.0.0.2:{self.port}"

    @property
    def names(self) -> list[str]:
        return [f"hpu-{number}" for number in range(1, self.nodes + 1)]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "NIGHTGRID_"))}
        kept |= {k: v for k, v in os.environ.items() if k == cpu_slots.VARIABLE}
        paths = [ROOT, ROOT / "tests" / "chaos", ROOT / "tests" / "ray"]
        return kept | {
            MARK: self.mark,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            **{name: value for name, value in self._token.items() if value is not None},
            "RAY_TMPDIR": self.temp_dir,
            "NIGHTGRID_CHAOS_HURRY": str(self._hurry),  # see chaos_worker.py
            "NIGHTGRID_CHAOS_LOGS": str(self.log_dir or ""),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_num_workers_soft_limit": str(self.cards),  # else none is kept for the next task
        }

    def __enter__(self) -> ChaosCluster:
        self.temp_dir = tempfile.mkdtemp(prefix="ngx-", dir="/tmp")
        self._token = new_token(Path(self.temp_dir))  # its nodes listen on every interface
        self._ending.enter_context(ray_environment(self._token))  # this process asks it too
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            self.port = probe.getsockname()[1]
        self.stay_away(*self.names)  # until each is started, below
        try:
            self._start_head()
            self._wait_for(1)
            for name in self.names:
                self.start(name)
                self._wait_for_raylet(name)  # all side by side they time out on two cores
            self._wait_for(1 + self.nodes)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _hurry(self) -> Path:
        return Path(self.temp_dir) / "hurry"

    def hurry(self) -> None:
        """Have the jobs that work end at once, those too that have not begun."""
        if not self._hurry.exists():
            self._hurry.touch()

    def start(self, name: str) -> None:
        self._down.discard(name)
        number = self.names.index(name) + 1
        resources = {"HPU": self.cards, "emulated": 1, "server_cards": self.cards}
        self._ray_start(
            name,
            f"127.0.0.{2 + number}",
            *("--address", self.address, "--resources", json.dumps(resources)),
        )

    def supervise(self) -> None:
        """Start nodes again that ended, as an init system does: Ray gives a node thirty seconds for
        its start, which a busy machine may not have. The head first, then one at a time."""
        for name in ("head", *self.names):
            process = self._processes.get(name)
            if name in self._down or (process is not None and process.poll() is None):
                continue
            if name != "head" and not (self._head_answers() and self._all_have_raylets()):
                return
            if process is not None:
                self.clear(name)
            if name == "head":
                self._start_head()
            else:
                self.start(name)
            return

    @property
    def is_whole(self) -> bool:
        """Return whether the head answers and every node has its raylet."""
        there = [self._processes.get(name) for name in ("head", *self.names)]
        running = all(process is not None and process.poll() is None for process in there)
        return running and self._all_have_raylets() and self._head_answers()

    def _all_have_raylets(self) -> bool:
        """Return whether every `ray start` that runs has come as far as its raylet."""
        return all(
            process.poll() is not None or self.part(name, "raylet") is not None
            for name, process in self._processes.items()
        )

    def _head_answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.2", self.port), timeout=1).close()
            return True
        return False

    def part(self, name: str, program: str) -> psutil.Process | None:
        """The process of this name (``raylet``, ``gcs_server``) of a node; None if it is gone."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._processes[name].pid).children():
                if process.name() == program and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def stay_away(self, *names: str) -> None:
        self._down |= set(names)

    def come_back(self, *names: str) -> None:
        self._down -= set(names)

    def end(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a node's `ray start`; with SIGKILL all of the node dies."""
        if number is signal.SIGKILL:
            self.clear(name)
            return
        with contextlib.suppress(ProcessLookupError):
            self._processes[name].send_signal(number)

    def kill_raylet(self, name: str) -> None:
        self._down.add(name)
        if (raylet := self.part(name, "raylet")) is not None:
            raylet.kill()

    def clear(self, name: str) -> list[str]:
        """Remove what is left of a server whose raylet was killed; the logs of the workers that
        were still there, which should be none."""
        left = [log for log, _ in self.worker_processes() if log.startswith(f"{name}-HPU")]
        started = self._processes.pop(name, None)
        if started is None:
            return left
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(started.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        return left

    def node_of(self, pid: int) -> str:
        starts = {process.pid: name for name, process in self._processes.items()}
        with contextlib.suppress(psutil.Error):
            for parent in psutil.Process(pid).parents():
                if parent.pid in starts:
                    return starts[parent.pid]
        return ""

    def close(self) -> None:
        for _ in range(50):
            left = self.processes()
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)
        for started in self._processes.values():
            started.wait(10)
        self._ending.close()
        shutil.rmtree(self.temp_dir, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        found = []
        sign = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, psutil.Error):
                if sign in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                    found.append(psutil.Process(int(entry.name)))
        return found

    def worker_processes(self) -> list[tuple[str, int]]:
        """Log name (node, card, worker id) and process id of every process on a card, children
        of workers included."""
        found = []
        for process in self.processes():
            with contextlib.suppress(OSError):
                log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
                ours = log.parent == self.log_dir or log.is_relative_to(self.temp_dir)
                if ours and "-HPU" in log.name:
                    found.append((log.name, process.pid))
        return sorted(found)

    def held_cards(self) -> float:
        """Cards that Ray does not call free; it is asked for some seconds, since it hears late of
        what was given back."""
        code = (
            "import ray, time\n"
            f"ray.init({self.address!r}, log_to_driver=False, logging_level='ERROR',"
            "_node_ip_address='127.0.0.2')\n"
            "for _ in range(40):\n"
            "    there, free = ray.cluster_resources(), ray.available_resources()\n"
            "    held = there.get('HPU', 0.0) - free.get('HPU', 0.0)\n"
            "    if not held: break\n"
            "    time.sleep(0.5)\n"
            "print('held', held)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=90,
        )
        line = next((x for x in done.stdout.splitlines() if x.startswith("held ")), "")
        assert line, done.stderr[-2000:]
        return float(line.split()[1])

    def memory_bytes(self) -> int:
        """Proportional memory of all processes: shared pages count once."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    # ------------------------------------------------------------ parts

    def _start_head(self) -> None:
        # Ray takes raylets of this host that still look for the old head for a running cluster.
        for known in Path(self.temp_dir).rglob("ray_current_cluster"):
            known.unlink(missing_ok=True)
        self._ray_start("head", "127.0.0.2", "--head", "--port", str(self.port))

    def _ray_start(self, name: str, ip: str, *arguments: str) -> None:
        self.started_at[name] = time.time()
        with open(f"{self.temp_dir}/{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                    *("--node-name", name, "--node-ip-address", ip),
                    *("--num-cpus", "0", "--object-store-memory", "80000000"),
                    *("--include-log-monitor", "false"),  # Ray wants one a host at most
                    *(("--include-dashboard", "false") if "--head" in arguments else ()),
                    *arguments,
                ],
                env=self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait_for_raylet(self, name: str) -> None:
        while self._processes[name].poll() is None and self.part(name, "raylet") is None:
            time.sleep(0.2)

    def _wait_for(self, nodes: int) -> None:
        deadline = time.monotonic() + _START_PATIENCE_S
        while True:
            if self._processes["head"].poll() is not None:
                raise RuntimeError(f"the head ended: {self.log('head')}")
            self.supervise()
            if self.alive() >= nodes:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster does not come up: {self.log('head')}")
            time.sleep(0.5)

    def alive(self) -> int:
        from ray._raylet import GcsClient

        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.2", self.port), timeout=1).close()
            with contextlib.suppress(Exception):  # it is still starting
                found = GcsClient(address=self.address).get_all_node_info(timeout=5)
                return sum(1 for node in found.values() if node.state == 0)
        return 0

    def log(self, name: str) -> str:
        return Path(f"{self.temp_dir}/{name}.log").read_text(errors="replace")[-2000:]


# ---------------------------------------------------------------- what is left behind

#: Words in the command lines of processes that a run starts; Ray's own go on.
_OURS = ("worker.spawn", "NodeAgent", "SIG_IGN", "chaos_run.py", "worker.main")
#: Set in the environment of all that a driver starts.
_OWNED = b"NIGHTGRID_OWNER="


def left_behind(cluster: ChaosCluster, patience_s: float = 20.0) -> list[str]:
    """Processes on cards and of drivers, sockets on which they listen, and cards that Ray does not
    call free."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [f"left running: {log} ({pid})" for log, pid in cluster.worker_processes()]
        left += processes_left(cluster.processes())
        left += listening(cluster.processes())
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    held = cluster.held_cards()
    return left + ([f"{held:g} cards are held"] if held else [])


def processes_left(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if any(word in title for word in _OURS):
                found.append(f"left running: {title[:80]} ({process.pid})")
    return found


def listening(processes: list[psutil.Process]) -> list[str]:
    """Ports of processes that belong to a driver, by the mark in their environment."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            if _OWNED not in Path(f"/proc/{process.pid}/environ").read_bytes():
                continue
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    port = connection.laddr.port
                    found.append(f"port {port} is open: {process.name()} ({process.pid})")
    return found
