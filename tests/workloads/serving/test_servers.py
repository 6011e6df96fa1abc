"""Servers as processes: ready by a token, watched, ended without a trace, failures explained."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_engine import command
from generation_cases import request

from workloads.base import BadConfiguration, OutOfMemory, ServerSilent
from workloads.devices import device_for
from workloads.engines.base import ServerCommand, ServerPlace
from workloads.serving import servers
from workloads.serving.servers import Server, ServerFailed
from workloads.util.processes import descendants, processes, started_ticks


def faulty(fault: str = "") -> Callable[[Any, ServerPlace], ServerCommand]:
    return lambda _, place: command(fault, place)


def start(fault: str = "", **options: Any) -> Server:
    return servers.start(faulty(fault), request("", engine="graph"), device_for("cpu"), **options)


def test_a_server_is_ready_when_it_has_generated_a_token_and_gone_after_stop() -> None:
    server = start("slow=0.3")
    assert server.process is not None
    pid = server.process.pid
    assert server.counters() == {"server_running": 1.0}  # the token that made it ready
    assert 0 < server.first_token(timeout_s=5) < 5
    server.stop()
    assert started_ticks(pid) is None
    with pytest.raises(ServerFailed, match="ended"):
        server.check()


def test_only_a_servers_own_key_opens_it() -> None:
    first, second = start(), start()
    try:
        assert first.key != second.key and first.key not in repr(first)
        stranger = Server(command=first.command, url=first.url, key=second.key)
        with pytest.raises(OSError, match="HTTP 401"):
            stranger.first_token(timeout_s=5)
    finally:
        first.stop()
        second.stop()


def test_nothing_of_a_server_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "END_S", 1.0)
    server = start("leaves-behind")
    found = re.search(r"left (\d+) (\S+)", server.quoted())
    assert found is not None and server.process is not None
    child, path, pid = int(found[1]), Path(found[2]), server.process.pid
    assert path.exists() and started_ticks(child) is not None
    os.kill(pid, signal.SIGSTOP)  # deaf to a polite request
    server.stop()
    assert not path.exists()
    assert (started_ticks(pid), started_ticks(child)) == (None, None)


def test_a_server_that_nobody_holds_is_ended() -> None:
    server = start()
    assert server.process is not None
    pid = server.process.pid
    del server
    gc.collect()
    assert started_ticks(pid) is None


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("refuses-to-start", BadConfiguration, "unrecognized arguments: --nonsense"),
        ("no-memory", OutOfMemory, "can't allocate memory"),
        (
            "cause-above",
            ServerFailed,
            r"1\): \(Core.*ValueError: no cache\n…\n.*RuntimeError: the co",
        ),
        ("dies-after=0", ServerFailed, "signal SIGKILL.*a kernel fault of the fake card"),
        ("healthy-silent", ServerSilent, "healthy, and emits no token within 0.4 s"),
        ("slow=60", ServerSilent, "not ready after 0.6 s"),
    ],
)
def test_a_server_that_does_not_start_says_why_and_is_gone(
    fault: str, error: type[Exception], message: str
) -> None:
    limit_s = 0.6 if fault.startswith("slow") else 20.0
    before = children()
    with pytest.raises(error, match=f"(?s){message}"):
        start(fault, limit_s=limit_s, silence_s=0.4)
    assert not children() - before  # an earlier test's may end meanwhile


def children() -> set[int]:
    return {stat.pid for stat in descendants(os.getpid(), processes())}


@pytest.fixture(params=["bound", "listening"])
def taken_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port of a process that answers nothing, with or without accepting connections."""
    with socket.socket() as holder:
        holder.bind((servers.HOST, 0))
        if request.param == "listening":
            holder.listen()
        yield holder.getsockname()[1]


def test_a_server_whose_port_is_taken_is_started_on_another_at_once(
    taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = servers.free_port()
    ports = iter([taken_port, free])
    monkeypatch.setattr(servers, "free_port", lambda: next(ports))
    began = time.monotonic()
    server = start()
    assert server.url.endswith(f":{free}")
    assert time.monotonic() - began < 25
    server.stop()


def test_a_server_that_dies_later_is_noticed_and_quoted() -> None:
    server = start("dies-after=2")
    server.first_token(timeout_s=5)
    with pytest.raises(OSError):
        server.first_token(timeout_s=5)
    time.sleep(0.1)
    with pytest.raises(ServerFailed, match=r"SIGKILL\): a kernel fault of the fake card"):
        server.check()


@pytest.mark.slow
def test_the_graph_engine_serves_from_a_process_of_its_own() -> None:
    from workloads.engines import engine_function

    serve = engine_function("graph", "serve", "cpu")
    job = request("", engine="graph", max_sequences=2, max_model_len=64)
    server = servers.start(serve, job, device_for("cpu"), threads=1)
    try:
        assert server.counters()["server_running"] == 0
        answer = server.ask("/v1/completions", {"prompt": [5, 6], "max_tokens": 70}, timeout_s=30)
    except OSError as error:
        assert "room for 1 to 62" in str(error)
    else:
        pytest.fail(answer)
    finally:
        server.stop()
