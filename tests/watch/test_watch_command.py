"""`nightgrid watch` as a user types it: what it prints, whom it lets in, how it ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import Nightgrid
from patience import patience
from run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def watching(
    results: Path, *options: str, end: signal.Signals = signal.SIGINT, deaf: bool = False
) -> Iterator[str]:
    """The command in a process of its own; the address that it prints. ``deaf`` to SIGINT is what
    a shell starts in the background."""
    command = [sys.executable, "-m", "orchestrator", "watch", "--results", str(results)]
    process = subprocess.Popen(
        [*command, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if deaf else None,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stdout.read()
        yield found[0]
        if deaf:
            process.send_signal(signal.SIGINT)
            assert status_of(found[0]) == 200
        process.send_signal(end)
        assert process.wait(timeout=patience(20)) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=patience(10)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_it_serves_the_newest_run_on_loopback_until_ctrl_c(tmp_path: Path) -> None:
    RunDirectory(tmp_path).status()
    with watching(tmp_path) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
        assert status_of(url) == 200 and status_of(f"{url}state") == 200


def test_in_the_background_it_ends_on_sigterm(tmp_path: Path) -> None:
    """Where a shell has SIGINT ignored, as `nightgrid watch &` in a script; the port is free."""
    RunDirectory(tmp_path).status()
    with watching(tmp_path, end=signal.SIGTERM, deaf=True) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        assert status_of(url) == 200
    with socket.socket() as asking:
        assert asking.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_beyond_loopback_it_makes_a_token_and_refuses_without(tmp_path: Path) -> None:
    RunDirectory(tmp_path).status()
    seen = set()
    for _ in range(2):
        with watching(tmp_path, "--host", "0.0.0.0") as url:
            found = re.fullmatch(r"http://[^:]+:(\d+)/\?token=([\w-]{32})", url)
            assert found, url
            port, token = found.groups()
            assert status_of(f"http://127.0.0.1:{port}/state") == 401
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/state", headers={"Authorization": f"Bearer {token}"}
            )
            with urllib.request.urlopen(request, timeout=patience(10)) as answer:
                assert answer.status == 200
            seen.add(token)
    assert len(seen) == 2


def test_what_cannot_be_served_is_refused(tmp_path: Path, nightgrid: Nightgrid) -> None:
    nightgrid("watch", "--results", tmp_path, code=4)
    RunDirectory(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = nightgrid("watch", "--results", tmp_path, "--port", port, code=1)
    assert "--port 0 takes a free port" in refused.err
    nightgrid("watch", "--port", "65536", code=2)
