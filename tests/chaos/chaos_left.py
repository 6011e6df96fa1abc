"""The remains of a run on its hosts once it is over: processes, cards, sockets, files."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
from chaos_cluster import ChaosCluster

_PATIENCE_S = 20.0
#: Words in the command lines of processes that a run starts; Ray's own go on.
_OURS = ("worker.spawn", "NodeAgent", "SIG_IGN", "chaos_run.py", "worker.main")
#: Set in the environment of all that a driver starts.
_OWNED = b"NIGHTGRID_OWNER="


def left_behind(cluster: ChaosCluster, patience_s: float = _PATIENCE_S) -> list[str]:
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
    """Those that a run started."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if any(word in title for word in _OURS):
                found.append(f"left running: {title[:80]} ({process.pid})")
    return found


def listening(processes: list[psutil.Process]) -> list[str]:
    """Ports on which processes listen that belong to a driver, by the mark in their environment."""
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
